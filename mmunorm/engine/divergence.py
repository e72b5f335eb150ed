"""Stops a run that has diverged, before it saves broken weights."""
from __future__ import annotations

import math

import torch
from mmengine.dist import all_reduce, broadcast_object_list
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import Tensor

from ..norms.base import check_count
from ..utils import RunError
from .runner import saves_after_this_step

ADVICE = ('Things to change, one at a time: lower the learning rate or lengthen its warm-up; clip gradients; train '
          'without --amp, or in bfloat16; use the outlier filter of UN, or a longer warmup_iters.')


class DivergenceError(RunError):
    """The run has diverged; the message has the step and advice."""


@HOOKS.register_module()
class DivergenceHook(Hook):
    """Stops a run whose loss is no longer finite; `tools/train.py` adds it.

    The run ends with a :class:`DivergenceError` after `patience` steps in a row with a loss that is not finite, and
    before a checkpoint with weights or statistics that are not finite is saved. In a distributed run, the mean loss
    over the processes decides.

    Args:
        patience (int): number of bad steps in a row that ends the run. Defaults to 10.
        interval (int): steps between two checks, each of which synchronizes with the device once. Defaults to 10.
    """

    def __init__(self, patience: int = 10, interval: int = 10):
        self.patience = check_count('patience', patience, minimum=1)
        self.interval = check_count('interval', interval, minimum=1)
        self.is_training = False

    def before_train(self, runner) -> None:
        self.is_training = True
        self._rows: list[Tensor] = []  # of the steps since the last check
        self._first_bad: dict = {}
        self._bad_steps = 0

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        if isinstance(outputs, dict) and 'loss' in outputs:
            self._rows.append(self.row(outputs['loss'].detach().float()))
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

    def row(self, loss: Tensor) -> Tensor:
        """The values of a step that decide whether it is bad: their mean over the processes is used."""
        return loss[None]

    def problem(self, runner, row: list[float]) -> dict | None:
        """None for a good step, else `reasons` (a list of texts), and whatever a subclass records."""
        return None if math.isfinite(row[0]) else dict(reasons=[f'the loss is {row[0]:.4g}'])

    def _check_losses(self, runner, last_step: int) -> None:
        if not self._rows:
            return
        rows = torch.stack(self._rows)
        self._rows = []
        all_reduce(rows, op='mean')
        for step, row in enumerate(rows.tolist(), start=last_step - len(rows) + 1):
            problem = self.problem(runner, row)
            if problem is None:
                self._bad_steps = 0
                continue
            if self._bad_steps == 0:
                self._first_bad = dict(step=step, **problem)
            self._bad_steps += 1
            if self._bad_steps == self.patience:
                self.stop(runner, self._first_bad, f'{self.patience} steps in a row were like that')

    def _check_weights(self, runner, step: int) -> None:
        """Stops a run if weights or statistics that are about to be saved are not finite in any process."""
        saved = [*runner.model.parameters(), *runner.model.buffers()]
        broken = torch.tensor(sum(not tensor.detach().isfinite().all() for tensor in saved))
        all_reduce(broken)
        if broken:
            self.stop(runner, self._first_bad if self._bad_steps else dict(step=step, reasons=[]),
                      'weights or statistics are not finite')

    def stop(self, runner, first_bad: dict, why: str) -> None:
        """Raises the same DivergenceError in all processes; `first_bad` is the first bad step of those in a row."""
        checkpoint = runner.message_hub.get_info('last_ckpt')
        saved = f'The last checkpoint is {checkpoint}.' if checkpoint else 'No checkpoint was saved.'
        message = [f'the run diverged at step {first_bad["step"]}: {"; ".join([*first_bad["reasons"], why])}. '
                   f'{saved} {ADVICE}']
        broadcast_object_list(message)  # only the first process knows the newest checkpoint
        runner.logger.error(message[0])
        raise DivergenceError(message[0])
