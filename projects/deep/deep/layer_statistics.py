"""Records statistics of each residual layer during training (Figures 3, 8 and 9 of arXiv 2305.02790)."""
from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import Tensor, nn

from mmunorm.compat import in_backward_pass
from mmunorm.engine.runner import unwrapped_model
from mmunorm.norms.base import check_count
from mmunorm.utils import PreflightError, write_text
from projects.paper.paper.norm_record import RecordError
from projects.paper.paper.norm_statistics import loss_scale

from .residuals import ResidualLayer
from .residuals.sublayer import describe

FILE = 'layers.csv'
MEASURES = ('gradient', 'cosine', 'active')
_HEADER = ','.join(('step', 'layer', *MEASURES))


@HOOKS.register_module()
class LayerStatisticsHook(Hook):
    """Records each residual layer's gradient norm, similarity to the layer before, and activity.

    `layers.csv` in the work directory has a row for each recorded step and layer:

    - `gradient`: the norm of the gradient of all parameters of the layer;
    - `cosine`: the cosine similarity between its input and its output, the mean over tokens;
    - `active`: the share of values after the activation of its FFN whose magnitude exceeds `threshold`.

    Values are NaN for layers that did not run. `projects/deep/tools/depth.py` draws them. Gradients are divided by the
    loss scale of mixed precision, and are of one iteration under gradient accumulation. With activation checkpointing,
    the first of the two forward passes is recorded. In a distributed run, the first process records.

    Args:
        first (int): record each of the first steps up to this one. Defaults to 100.
        interval (int): afterwards, record every n-th step. Defaults to 100.
        threshold (float): the magnitude up to which an activation counts as zero. ReLU returns exact zeros, GELU hardly
            any. Defaults to 0.01.

    Raises:
        ValueError: `first` or `interval` is out of range.
        PreflightError: when training begins: no layer of the model has a residual scheme.
    """

    def __init__(self, first: int = 100, interval: int = 100, threshold: float = 0.01):
        self.first = check_count('first', first, minimum=0)
        self.interval = check_count('interval', interval, minimum=1)
        self.threshold = threshold
        self._taps: dict[str, LayerTap] = {}

    def before_train(self, runner) -> None:
        if not is_main_process():
            return
        layers = {name: module for name, module in unwrapped_model(runner).named_modules()
                  if isinstance(module, ResidualLayer)}
        if not layers:
            raise PreflightError('LayerStatisticsHook: no layer of the model has a residual scheme; use '
                                 'UNVisionTransformer, ResidualSwinTransformer or ResidualT2TViT as its '
                                 'backbone.')
        self._path = Path(runner.work_dir, FILE)
        lines = self._path.read_text().splitlines()[1:] if runner.iter > 0 and self._path.exists() else []
        kept = [line for line in lines if line.count(',') == _HEADER.count(',')  # without truncated lines
                and int(line.partition(',')[0]) <= runner.iter]
        write_text(self._path, '\n'.join([_HEADER, *kept]) + '\n')
        self._taps = {name: LayerTap(layer, self.threshold) for name, layer in layers.items()}

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        if self._taps and self._is_recorded(runner.iter + 1):
            self._loss_scale = loss_scale(runner)  # the step may change it
            for tap in self._taps.values():
                tap.open()

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        if self._taps and self._is_recorded(runner.iter + 1):
            with self._path.open('a') as file:
                for name, tap in self._taps.items():
                    values = ','.join(f'{value:.7g}' for value in tap.close(self._loss_scale))
                    file.write(f'{runner.iter + 1},{name},{values}\n')

    def after_train(self, runner) -> None:
        for tap in self._taps.values():
            for handle in tap.handles:
                handle.remove()
        self._taps = {}

    def _is_recorded(self, step: int) -> bool:
        return step <= self.first or step % self.interval == 0


class LayerTap:
    """Measures one residual layer during a training step."""

    def __init__(self, layer: ResidualLayer, threshold: float):
        self.threshold = threshold
        self.is_open = False
        last = describe(layer.ffn).last_module
        self.handles = [layer.register_forward_hook(self._on_output), last.register_forward_pre_hook(self._on_active)]
        self.handles += [parameter.register_hook(self._on_gradient) for parameter in layer.parameters()
                         if parameter.requires_grad]

    def open(self) -> None:
        self.is_open = True
        self.squares: list[Tensor] = []
        self.cosine: Tensor | float = math.nan
        self.active: Tensor | float = math.nan

    def close(self, loss_scale: float) -> tuple[float, float, float]:
        """Ends the step; returns `MEASURES`. The gradients are multiplied by `loss_scale`."""
        self.is_open = False
        gradient = float(sum(self.squares))**0.5 / loss_scale if self.squares else math.nan
        return gradient, float(self.cosine), float(self.active)

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
            self.squares.append(gradient.detach().double().square().sum())


class LayerRecord(NamedTuple):
    """The measures of a run with L residual layers."""
    steps: np.ndarray  # the recorded steps `(S,)`, from 1
    layers: list[str]
    values: dict[str, np.ndarray]  # `(S, L)` for each of `MEASURES`


def read_layers(work_dir: str | Path) -> LayerRecord:
    """Reads the measures of a run.

    Raises:
        RecordError: the folder has no measures, or they are damaged.
    """
    path = Path(work_dir, FILE)
    if not path.is_file():
        raise RecordError(f'there is no {path}: train with `custom_hooks=[dict(type=\'LayerStatisticsHook\')]`.')
    with path.open(newline='') as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise RecordError(f'{path} has no steps yet.')
    try:
        layers = list(dict.fromkeys(row['layer'] for row in rows))
        steps = np.array([int(row['step']) for row in rows[::len(layers)]])
        values = {measure: np.array([float(row[measure]) for row in rows]).reshape(-1, len(layers))
                  for measure in MEASURES}
    except (TypeError, ValueError, KeyError) as error:
        raise RecordError(f'{path} is damaged: {error}.') from error
    return LayerRecord(steps, layers, values)
