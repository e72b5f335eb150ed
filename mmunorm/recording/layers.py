"""What each residual layer does while a model trains: its gradient, its likeness to the layer before, its activity.

These are the measures of Figures 3, 8 and 9 of BranchNorm's paper (arXiv 2305.02790). A work directory holds them as
`layers.csv`, with one row for each recorded step and layer.
"""
from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat import in_backward_pass
from ..residuals import ResidualLayer
from ..residuals.sublayer import describe
from ..utils import write_text
from .record import RecordError

FILE = 'layers.csv'
FIELDS = ('gradient', 'cosine', 'active')
_HEADER = ','.join(('step', 'layer', *FIELDS))


class LayerTap:
    """Takes the measures of one residual layer during a training step.

    - gradient: the norm of the gradient of all its parameters.
    - cosine: the cosine similarity between its input and its output, the mean over tokens.
    - active: the share of the numbers behind the activation of its FFN that are beyond `threshold` in size.

    With activation checkpointing the first of the two forward passes counts. What did not run is NaN.

    Args:
        layer: the layer.
        threshold: what counts as zero.
    """

    def __init__(self, layer: ResidualLayer, threshold: float):
        self.threshold = threshold
        self.is_open = False
        reader = describe(layer.ffn).reader
        self.handles = [layer.register_forward_hook(self._on_output), reader.register_forward_pre_hook(self._on_active)]
        self.handles += [parameter.register_hook(self._on_gradient) for parameter in layer.parameters()
                         if parameter.requires_grad]

    def open(self) -> None:
        """Begins a step."""
        self.is_open = True
        self.square: Tensor | float = math.nan
        self.cosine: Tensor | float = math.nan
        self.active: Tensor | float = math.nan

    def close(self, loss_scale: float) -> tuple[float, float, float]:
        """Ends the step; answers `FIELDS`. The gradients hold the factor `loss_scale`."""
        self.is_open = False
        return float(self.square)**0.5 / loss_scale, float(self.cosine), float(self.active)

    def remove(self) -> None:
        """Takes the hooks from the layer."""
        while self.handles:
            self.handles.pop().remove()

    @torch.no_grad()
    def _on_output(self, layer: nn.Module, args: tuple, output: Tensor) -> None:
        if self.is_open and not in_backward_pass():
            self.cosine = F.cosine_similarity(args[0].float(), output.float(), dim=-1).mean()

    @torch.no_grad()
    def _on_active(self, reader: nn.Module, args: tuple[Tensor]) -> None:
        if self.is_open and not in_backward_pass():
            self.active = (args[0].abs() > self.threshold).float().mean()

    def _on_gradient(self, gradient: Tensor) -> None:
        if self.is_open:
            square = gradient.detach().double().square().sum()
            self.square = square if isinstance(self.square, float) else self.square + square


class LayerRecord(NamedTuple):
    """The measures of a run.

    Attributes:
        steps (numpy.ndarray): the recorded steps `(S,)`, from 1.
        layers (list[str]): names of the L layers.
        values (dict[str, numpy.ndarray]): `(S, L)` for each of `FIELDS`.
    """
    steps: np.ndarray
    layers: list[str]
    values: dict[str, np.ndarray]


def begin_layers(work_dir: str | Path, last_step: int) -> None:
    """Begins the file of a run: a new one, or where it is resumed the rows up to `last_step`."""
    path = Path(work_dir, FILE)
    lines = path.read_text().splitlines()[1:] if last_step > 0 and path.exists() else []
    kept = [line for line in lines if int(line.partition(',')[0]) <= last_step]
    write_text(path, '\n'.join([_HEADER, *kept]) + '\n')


def append_layers(work_dir: str | Path, step: int, rows: Sequence[tuple[str, float, float, float]]) -> None:
    """Adds one step: for each layer its name and `FIELDS`."""
    with Path(work_dir, FILE).open('a') as file:
        file.writelines(f'{step},{name},{",".join(f"{value:.7g}" for value in values)}\n' for name, *values in rows)


def read_layers(work_dir: str | Path) -> LayerRecord:
    """Reads the measures of a run.

    Raises:
        RecordError: the folder has none, or they are damaged.
    """
    path = Path(work_dir, FILE)
    if not path.is_file():
        raise RecordError(f'there is no {path}: train with `custom_hooks=[dict(type=\'LayerStatisticsHook\')]`.')
    with path.open(newline='') as file:
        rows = list(csv.DictReader(file))
    layers = list(dict.fromkeys(row['layer'] for row in rows))
    try:
        steps = np.array(sorted({int(row['step']) for row in rows}))
        values = {field: np.array([float(row[field]) for row in rows]).reshape(len(steps), len(layers))
                  for field in FIELDS}
    except (TypeError, ValueError) as error:
        raise RecordError(f'{path} is damaged: {error}.') from error
    if not rows:
        raise RecordError(f'{path} holds no step yet.')
    return LayerRecord(steps, layers, values)
