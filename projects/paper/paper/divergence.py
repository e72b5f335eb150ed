"""Stops a run that has diverged, and records where: FAIL in the paper's tables."""
from __future__ import annotations

import json
import math
import statistics
from functools import partial
from pathlib import Path

import torch
from mmengine.dist import is_main_process
from mmengine.registry import HOOKS, Registry
from torch import Tensor, nn

from mmunorm.compat import in_backward_pass, is_compiling
from mmunorm.engine import DivergenceError
from mmunorm.engine import DivergenceHook as StopHook
from mmunorm.engine.runner import unwrapped_model
from mmunorm.norms.layers import is_norm
from mmunorm.utils import write_text

RECORD = 'divergence.json'
# `paper.DivergenceHook` in a config replaces the DivergenceHook that tools/train.py adds.
PAPER_HOOKS = Registry('hook', parent=HOOKS, scope='paper')


@PAPER_HOOKS.register_module()
class DivergenceHook(StopHook):
    """Stops a run whose loss is no longer finite or has risen, and writes `divergence.json` into its work directory.

    A step is bad if its loss is not finite or, with `factor`, exceeds `factor` times the median of the first `patience`
    losses. When :class:`mmunorm.engine.DivergenceHook` stops the run, `divergence.json` has `step` (the first bad one,
    counted from 1), its `loss`, `start_loss`, `layer` (the first norm layer, in the order of execution, whose output
    was not finite at that step), `checkpoint` (the last one saved) and `message` (all of this in words). Unknown or
    non-finite values are None. In a compiled model no layer is named.

    Args:
        patience (int): number of bad steps in a row that ends the run. Defaults to 10.
        factor (float, optional): ratio to the starting loss above which a step is bad. Defaults to None: any finite
            loss is accepted.
        interval (int): steps between two checks. Defaults to 10.
    """

    def __init__(self, patience: int = 10, factor: float | None = None, interval: int = 10):
        super().__init__(patience, interval)
        if factor is not None and not 1 < factor < math.inf:
            raise ValueError(f'factor must be a finite number above 1, got {factor!r}')
        self.factor = factor

    def before_train(self, runner) -> None:
        super().before_train(runner)
        if is_main_process():
            Path(runner.work_dir, RECORD).unlink(missing_ok=True)
        self._first_losses = list(runner.message_hub.get_info('divergence_first_losses', ()))
        self._norms = {name: module for name, module in unwrapped_model(runner).named_modules() if is_norm(module)}
        self._finite: dict[str, Tensor] = {}  # whether each norm's output is finite in the current step
        self._order: dict[str, None] = {}  # names of the norms in the order of execution
        self._handles = [module.register_forward_hook(partial(self._watch, name))
                         for name, module in self._norms.items()]

    def _watch(self, name: str, module: nn.Module, args, output) -> None:
        if module.training and isinstance(output, Tensor) and not (is_compiling() or in_backward_pass()):
            self._order.setdefault(name)
            # A sum reads the output once; overflow counts as not finite. A norm may be called several times.
            finite = output.detach().sum(dtype=torch.float32).isfinite().float()
            self._finite[name] = finite * self._finite.get(name, 1)

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        self._finite = {}

    def after_train(self, runner) -> None:
        super().after_train(runner)
        for handle in self._handles:
            handle.remove()

    def row(self, loss: Tensor) -> Tensor:
        yes = loss.new_ones(())
        return torch.stack([loss, *(self._finite.get(name, yes) for name in self._norms)])

    def problem(self, runner, row: list[float]) -> dict | None:
        loss, *finite = row
        start = self._start_loss()
        has_risen = self.factor is not None and start is not None and loss > self.factor * start
        if math.isfinite(loss) and not has_risen:
            if len(self._first_losses) < self.patience:
                self._first_losses.append(loss)
                runner.message_hub.update_info('divergence_first_losses', self._first_losses)
            return None
        reasons = [f'the loss is {loss:.4g}']
        if math.isfinite(loss):
            reasons[0] += f', more than {self.factor:g} times the {start:.4g} of the start'
        broken = [name for name, value in zip(self._norms, finite, strict=True) if value < 1]
        layer = next((name for name in self._order if name in broken), None)
        if layer is not None:
            reasons.append(f'the first norm layer with an output that is not finite is {layer}')
        return dict(reasons=reasons, loss=loss if math.isfinite(loss) else None, layer=layer)  # JSON has no NaN

    def _start_loss(self) -> float | None:
        return statistics.median(self._first_losses) if self._first_losses else None

    def stop(self, runner, first_bad: dict, why: str) -> None:
        try:
            super().stop(runner, first_bad, why)
        except DivergenceError as error:
            if is_main_process():
                record = dict(step=first_bad['step'], loss=first_bad.get('loss'), layer=first_bad.get('layer'),
                              start_loss=self._start_loss(), checkpoint=runner.message_hub.get_info('last_ckpt'),
                              message=str(error))
                write_text(Path(runner.work_dir, RECORD), json.dumps(record, indent=1))
            raise
