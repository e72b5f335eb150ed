"""Stops a run that has diverged, while its last good checkpoint is still there."""
from __future__ import annotations

import json
import math
import os
import shutil
import statistics
from functools import partial
from pathlib import Path

import torch
from mmengine.dist import all_reduce, is_main_process
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from torch import Tensor, nn

from ..fusion import is_norm
from ..norms.base import check_count
from .errors import RunError
from .hooks import saves_after_this_step

RECORD = 'divergence.json'
LAST_GOOD = 'last_good.pth'


class DivergenceError(RunError):
    """The run has diverged; the message says when, in which layer, and what to change."""


@HOOKS.register_module()
class DivergenceHook(Hook):
    """Stops a run whose loss or activations are no longer finite, or whose loss has exploded.

    A step is bad when its loss or the output of a norm layer is not finite, or when its loss exceeds
    `factor` times the starting loss, the median of the first `patience` good ones. After `patience` bad
    steps in a row, or if the run ends in steps that are not finite, it stops with a
    :class:`DivergenceError`; `divergence.json` in the work directory has

    - `step` (int): the first bad step, counted from 1; `loss` at it and `start_loss` (float or None);
    - `layer` (str or None): the first norm layer, in the order of execution, whose output is not finite at
      that step; where all are finite, the one whose largest output has grown most since the last good step;
    - `checkpoint` (str or None): the last checkpoint saved before it;
    - `message` (str): all of it in words, with advice.

    From the first bad step on, the last good checkpoint is kept as `last_good.pth`, whatever
    `max_keep_ckpts` says, until the run recovers. In a distributed run the mean over the processes decides.

    Args:
        patience (int): bad steps in a row that end the run. Defaults to 10.
        factor (float): how many times the starting loss is an explosion. Defaults to 3.
        interval (int): steps between two looks at what was recorded; each waits for the device once.
            Defaults to 10.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, patience: int = 10, factor: float = 3.0, interval: int = 10):
        for name, value in (('patience', patience), ('interval', interval)):
            check_count(name, value, least=1)
        if not factor > 1:
            raise ValueError(f'factor must be more than 1, got {factor!r}')
        self.patience = patience
        self.factor = factor
        self.interval = interval

    def before_train(self, runner) -> None:
        if is_main_process():
            Path(runner.work_dir, RECORD).unlink(missing_ok=True)
        self._first_losses = list(_info(runner, 'divergence_first_losses', []))
        self._peaks: dict[str, Tensor] = {}  # of the current step
        self._rows: list[Tensor] = []  # loss and peaks of the steps since the last look
        self._good: list[float] | None = None  # the row of the last good step
        self._bad: list[float] | None = None  # the row of the first step of the bad ones in a row
        self._bad_steps = 0
        self._order: dict[str, int] = {}
        self._handles = []
        self._names = []
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        for name, module in model.named_modules():
            if is_norm(module):
                self._names.append(name)
                self._handles.append(module.register_forward_hook(partial(self._watch, name)))

    def _watch(self, name: str, module: nn.Module, args, output) -> None:
        if module.training and isinstance(output, Tensor) and output.numel():
            peak = torch.linalg.vector_norm(output.detach(), torch.inf).float()
            self._order.setdefault(name, len(self._order))
            self._peaks[name] = torch.maximum(self._peaks[name], peak) if name in self._peaks else peak

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        loss = outputs['loss'].detach().float()
        absent = loss.new_zeros(())
        self._rows.append(torch.stack([loss, *(self._peaks.get(name, absent) for name in self._names)]))
        self._peaks = {}
        if len(self._rows) >= self.interval or saves_after_this_step(runner):
            self._look(runner)

    def after_train_epoch(self, runner) -> None:
        # `runner.iter` counts the epoch's last step by now.
        self._look(runner, last_step=runner.iter)

    def after_train(self, runner) -> None:
        for handle in self._handles:
            handle.remove()
        if self._bad_steps and not all(map(math.isfinite, self._bad)):
            # The run has ended before `patience` steps were bad; weights that are not finite do not recover.
            self._stop(runner, runner.iter - self._bad_steps + 1)

    def _look(self, runner, last_step: int | None = None) -> None:
        if not self._rows:
            return
        rows = torch.stack(self._rows)
        self._rows = []
        all_reduce(rows, op='mean')
        last_step = runner.iter + 1 if last_step is None else last_step
        for step, row in enumerate(rows.tolist(), start=last_step - len(rows) + 1):
            if not self._is_bad(row, runner):
                self._good = row
                self._bad_steps = 0
                continue
            if self._bad_steps == 0:
                self._bad = row
            self._bad_steps += 1
            if self._bad_steps == self.patience:
                self._keep_last_good(runner)
                self._stop(runner, step - self.patience + 1)
        self._keep_last_good(runner)

    def _is_bad(self, row: list[float], runner) -> bool:
        if not all(map(math.isfinite, row)):
            return True
        start = self._start_loss()
        if start is not None and row[0] > self.factor * start:
            return True
        if len(self._first_losses) < self.patience:
            self._first_losses.append(row[0])
            runner.message_hub.update_info('divergence_first_losses', self._first_losses)
        return False

    def _start_loss(self) -> float | None:
        return statistics.median(self._first_losses) if self._first_losses else None

    def _keep_last_good(self, runner) -> None:
        """Gives the last checkpoint a second name while steps are bad, before anything else removes it."""
        if not is_main_process():
            return
        kept = Path(runner.work_dir, LAST_GOOD)
        if self._bad_steps == 0:
            kept.unlink(missing_ok=True)
            return
        last = _info(runner, 'last_ckpt')
        if not kept.exists() and last and os.path.isfile(last):
            try:
                os.link(last, kept)
            except OSError:  # a file system without hard links
                shutil.copyfile(last, kept)

    def _stop(self, runner, step: int) -> None:
        loss, start = self._bad[0], self._start_loss()
        layer, trouble = self._layer()
        kept = Path(runner.work_dir, LAST_GOOD)
        checkpoint = str(kept) if kept.exists() else None
        what = f'the loss is {loss:.4g}'
        if math.isfinite(loss) and start is not None and loss > self.factor * start:
            what += f', more than {self.factor:g} times the {start:.4g} of the start'
        message = (f'the run diverged at step {step}: {what}; {trouble}. {self._bad_steps} steps in a row '
                   f'were like that. ' + (f'The last good checkpoint is {checkpoint}. ' if checkpoint else
                                     'No checkpoint was saved before. ') + _advice(runner))
        if is_main_process():
            record = dict(step=step, loss=_finite(loss), start_loss=_finite(start), layer=layer,
                          checkpoint=checkpoint, message=message)
            Path(runner.work_dir, RECORD).write_text(json.dumps(record, indent=1))
        runner.logger.error(message)
        raise DivergenceError(message)

    def _layer(self) -> tuple[str | None, str]:
        """The layer to blame at the first bad step, and what is wrong with it."""
        peaks = sorted(zip(self._names, self._bad[1:], strict=True),
                       key=lambda item: self._order.get(item[0], len(self._order)))
        for name, peak in peaks:
            if not math.isfinite(peak):
                return name, f'the first norm layer with a non-finite output is {name}'
        if self._good is None or not peaks:
            return None, 'the outputs of all norm layers are finite'
        before = dict(zip(self._names, self._good[1:], strict=True))
        name, growth = max(((name, peak / before[name]) for name, peak in peaks if before[name] > 0),
                           key=lambda item: item[1], default=(None, 1))
        if growth <= 1:
            return None, 'the outputs of all norm layers are finite and have not grown'
        return name, f'the output of {name} has grown most, {growth:.3g} times since the last good step'


def _info(runner, key: str, default=None):
    hub = runner.message_hub
    return hub.get_info(key) if key in hub.runtime_info else default


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None  # JSON has no NaN


def _advice(runner) -> str:
    """What to change, the likeliest first."""
    wrapper = runner.optim_wrapper
    advice = []
    if any(getattr(module, 'outlier_filter', True) is False for module in runner.model.modules()):
        advice.append('turn the outlier filter on (norm_cfg=dict(outlier_filter=True))')
    if type(wrapper).__name__ == 'AmpOptimWrapper':
        advice.append('train without --amp, or with dtype bfloat16, to see whether float16 overflows')
    if not getattr(wrapper, 'clip_grad_kwargs', None):
        advice.append('clip gradients (optim_wrapper=dict(clip_grad=dict(max_norm=5.0)))')
    advice.append('lower the learning rate or lengthen its warm-up')
    if any(hasattr(module, 'warmup_iters') for module in runner.model.modules()):
        advice.append('raise warmup_iters in norm_cfg, so that averaging starts later')
    return f'Things to change, one at a time: {"; ".join(advice)}.'
