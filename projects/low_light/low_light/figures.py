"""Figures of enhanced images."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from projects.paper.paper.layout import WIDTH, finish, new_panels, wrapped


class Light(NamedTuple):
    """An image, the enhanced image, and the gamma and colour matrix of IAT's global branch."""
    name: str
    before: np.ndarray  # RGB uint8 `(h, w, 3)`
    after: np.ndarray
    gamma: float  # the exponent; below 1 brightens an image
    matrix: np.ndarray  # of colours, `(3, 3)`


def light_figure(lights: Sequence[Light]) -> Figure:
    """A figure with a row for each image: before, after, and the colour matrix, with gamma above it."""
    figure, panels = new_panels(len(lights), 3)
    limit = max(1., *(np.abs(light.matrix).max() for light in lights))
    for before, after, axes, light in zip(panels[::3], panels[1::3], panels[2::3], lights, strict=True):
        before.imshow(light.before, aspect='auto')
        before.set_title(wrapped(light.name, WIDTH / 3), fontsize='x-small')
        after.imshow(light.after, aspect='auto')
        for image in (before, after):
            image.set_axis_off()
        axes.grid(False)
        axes.imshow(light.matrix, cmap='RdBu_r', vmin=-limit, vmax=limit, aspect='auto')
        for i, j in np.ndindex(3, 3):
            value = light.matrix[i, j]
            axes.text(j, i, f'{value:.2f}', ha='center', va='center', fontsize='x-small',
                      color='white' if abs(value) > 0.6 * limit else 'black')
        axes.set_title(f'gamma {light.gamma:.2f}', fontsize='x-small')
        axes.set_xticks(range(3), 'RGB', fontsize='x-small')
        axes.set_yticks(range(3), 'RGB', fontsize='x-small')
    finish(figure, 1.2, 'Before, after, and the colour matrix from columns to rows', handles={})
    return figure
