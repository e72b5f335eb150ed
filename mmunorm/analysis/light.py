"""What an IAT does to the light of pictures: gamma and colour matrix beside the picture before and after."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from .layout import finish, wrapped

WIDTH = 4.5  # inches


@dataclass(frozen=True)
class Light:
    """One picture and what its global branch says.

    Attributes:
        name: of the picture.
        before, after: RGB uint8 `(h, w, 3)`.
        gamma: what the light is raised to; below 1 makes a picture lighter.
        matrix: colour matrix, `(3, 3)`.
    """
    name: str
    before: np.ndarray
    after: np.ndarray
    gamma: float
    matrix: np.ndarray


def light_figure(lights: Sequence[Light]) -> Figure:
    """A row for each picture: before, after, and the colour matrix, with gamma above it."""
    figure = Figure((WIDTH, 1), layout='constrained')
    grid = figure.subplots(len(lights), 3, squeeze=False)
    limit = max(1., *(np.abs(light.matrix).max() for light in lights))
    for row, light in zip(grid, lights, strict=True):
        for axes, picture, title in ((row[0], light.before, wrapped(light.name, WIDTH / 3)), (row[1], light.after, '')):
            axes.imshow(picture, aspect='auto')
            axes.set_title(title, fontsize='x-small')
            axes.set_axis_off()
        axes = row[2]
        axes.imshow(light.matrix, cmap='RdBu_r', vmin=-limit, vmax=limit, aspect='auto')
        for i, j in np.ndindex(3, 3):
            value = light.matrix[i, j]
            axes.text(j, i, f'{value:.2f}', ha='center', va='center', fontsize='x-small',
                      color='white' if abs(value) > 0.6 * limit else 'black')
        axes.set_title(f'gamma {light.gamma:.2f}', fontsize='x-small')
        axes.set_xticks(range(3), 'RGB', fontsize='x-small')
        axes.set_yticks(range(3), 'RGB', fontsize='x-small')
    finish(figure, list(grid.flat), 1.2, 'Before, after, and the colour matrix from columns to rows', handles={})
    return figure
