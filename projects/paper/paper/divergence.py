"""Stops a run that has diverged, and records where: FAIL in the paper's tables."""
from __future__ import annotations

import json
import math
import statistics
from functools import partial
from pathlib import Path

import torch
from mmengine.dist import all_reduce, broadcast_object_list, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import Tensor, nn

from mmunorm.compat import in_backward_pass, is_compiling
from mmunorm.engine.runner import saves_after_this_step, unwrapped_model
from mmunorm.norms.base import check_count
from mmunorm.norms.layers import is_norm
from mmunorm.utils import RunError, write_text

RECORD = 'divergence.json'
ADVICE = ('Things to change, one at a time: lower the learning rate or lengthen its warm-up; clip gradients; train '
          'without --amp, or in bfloat16; use the outlier filter of UN, or a longer warmup_iters.')


class DivergenceError(RunError):
    """The run has diverged; the message has the step and advice."""


@HOOKS.register_module()
class DivergenceHook(Hook):
    """Stops a run whose loss is no longer finite or has risen, and writes `divergence.json` into its work directory.

    A step is bad if its loss is not finite or, with `factor`, exceeds `factor` times the median of the first `patience`
    losses. The run ends with a :class:`DivergenceError` after `patience` bad steps in a row, and before a checkpoint
    with weights or statistics that are not finite is saved. In a distributed run, the mean loss over the processes
    decides.

    `divergence.json` has `step` (the first bad one, counted from 1), its `loss`, `start_loss`, `layer` (the first norm
    layer, in the order of execution, whose output was not finite at that step), `checkpoint` (the last one saved) and
    `message` (all of this in words). Unknown or non-finite values are None. In a compiled model no layer is named.

    Args:
        patience (int): number of bad steps in a row that ends the run. Defaults to 10.
        factor (float, optional): ratio to the starting loss above which a step is bad. Defaults to None: any finite
            loss is accepted.
        interval (int): steps between two checks, each of which synchronizes with the device once. Defaults to 10.
    """

    def __init__(self, patience: int = 10, factor: float | None = None, interval: int = 10):
        self.patience = check_count('patience', patience, minimum=1)
        self.interval = check_count('interval', interval, minimum=1)
        if factor is not None and not 1 < factor < math.inf:
            raise ValueError(f'factor must be a finite number above 1, got {factor!r}')
        self.factor = factor
        self.is_training = False

    def before_train(self, runner) -> None:
        self.is_training = True
        self._rows: list[Tensor] = []  # of the steps since the last check
        self._first_bad: dict = {}
        self._bad_steps = 0
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
        if isinstance(outputs, dict) and 'loss' in outputs:
            loss = outputs['loss'].detach().float()
            yes = loss.new_ones(())
            self._rows.append(torch.stack([loss, *(self._finite.get(name, yes) for name in self._norms)]))
        self._finite = {}
        saves = saves_after_this_step(runner)
        if saves or len(self._rows) >= self.interval:
            self._check_losses(runner, runner.iter + 1)
        if saves:
            self._check_weights(runner, runner.iter + 1)

    def after_train_epoch(self, runner) -> None:
        # `runner.iter` already includes the epoch's last step.
        self._check_losses(runner, runner.iter)
        self._check_weights(runner, runner.iter)

    def before_val_epoch(self, runner) -> None:
        if self.is_training:  # the best checkpoint is saved after it
            self._check_weights(runner, runner.iter)

    def after_train(self, runner) -> None:
        self.is_training = False
        for handle in self._handles:
            handle.remove()

    def _check_losses(self, runner, last_step: int) -> None:
        if not self._rows:
            return
        rows = torch.stack(self._rows)
        self._rows = []
        all_reduce(rows, op='mean')
        for step, (loss, *finite) in enumerate(rows.tolist(), start=last_step - len(rows) + 1):
            problem = self._problem(runner, loss, finite)
            if problem is None:
                self._bad_steps = 0
                continue
            if self._bad_steps == 0:
                self._first_bad = dict(step=step, **problem)
            self._bad_steps += 1
            if self._bad_steps == self.patience:
                self._stop(runner, self._first_bad, f'{self.patience} steps in a row were like that')

    def _check_weights(self, runner, step: int) -> None:
        """Stops a run if weights or statistics that are about to be saved are not finite in any process."""
        saved = [*runner.model.parameters(), *runner.model.buffers()]
        broken = torch.tensor(sum(not tensor.detach().isfinite().all() for tensor in saved))
        all_reduce(broken)
        if broken:
            self._stop(runner, self._first_bad if self._bad_steps else dict(step=step, reasons=[]),
                       'weights or statistics are not finite')

    def _problem(self, runner, loss: float, finite: list[float]) -> dict | None:
        """None for a good step, else its `reasons`, `loss` and `layer`; `finite` is 1 for each norm that is."""
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

    def _stop(self, runner, first_bad: dict, why: str) -> None:
        """Raises the same DivergenceError in all processes; `first_bad` is the first bad step of those in a row."""
        checkpoint = runner.message_hub.get_info('last_ckpt')
        saved = f'The last checkpoint is {checkpoint}.' if checkpoint else 'No checkpoint was saved.'
        message = [f'the run diverged at step {first_bad["step"]}: {"; ".join([*first_bad["reasons"], why])}. '
                   f'{saved} {ADVICE}']
        broadcast_object_list(message)  # only the first process knows the newest checkpoint
        runner.logger.error(message[0])
        if is_main_process():
            record = dict(step=first_bad['step'], loss=first_bad.get('loss'), layer=first_bad.get('layer'),
                          start_loss=self._start_loss(), checkpoint=checkpoint, message=message[0])
            write_text(Path(runner.work_dir, RECORD), json.dumps(record, indent=1))
        raise DivergenceError(message[0])
