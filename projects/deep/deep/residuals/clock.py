"""Counts the optimizer updates that BranchNorm's weight depends on."""
from __future__ import annotations

from collections import OrderedDict
from functools import wraps
from types import MethodType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

SCHEDULES = ('linear', 'exponential', 'sigmoid')


class UpdateClock(nn.Module):
    """The number of optimizer updates of a model: the buffer `updates`, `()` int64, of :func:`count_updates`."""
    is_counted = False  # whether :func:`count_updates` was called

    def __init__(self):
        super().__init__()
        self.register_buffer('updates', torch.zeros((), dtype=torch.long))


def clocks(model: nn.Module) -> list[UpdateClock]:
    """The clocks of a model."""
    return [module for module in model.modules() if isinstance(module, UpdateClock)]


def count_updates(model: nn.Module, optimizer: Optimizer) -> RemovableHandle:
    """Makes a model count the updates of an optimizer; for training loops without mmengine.

    Call it once, before the first step, with the model, wrapped or not, and the optimizer of its parameters. Calls of
    `optimizer.step()` count, except those that a gradient scaler skips; forward passes do not. It does not synchronize
    with the device. `remove()` of the returned handle ends the counting.
    """
    # Not with the optimizer's hooks: torch 2.1 calls none once something has been compiled.
    counted = OrderedDict()
    handle = RemovableHandle(counted)
    counted[handle.id] = clocks(model)
    for clock in counted[handle.id]:
        clock.is_counted = True
    step = optimizer.step

    @wraps(getattr(step, '__func__', step))
    def step_and_count(self, *args, **kwargs):
        result = step(*args, **kwargs)
        # A fused optimizer checks itself whether it has to skip a step; it gets this number from the scaler.
        infs = getattr(optimizer, 'found_inf', None)
        for clock in counted.get(handle.id, ()):
            clock.updates += 1 if infs is None else infs.reshape(()).eq(0)
        return result

    optimizer.step = MethodType(step_and_count, optimizer)  # schedulers wrap it in turn, and need a method
    return handle


def branch_weight(updates: Tensor, warmup_iters: int, schedule: str) -> Tensor:
    """The weight `a_t` of a branch: 0 at t = 0, exactly 1 from t = T on.

    'linear' is `t / T`, Eq. 8 of arXiv 2305.02790. The paper has no formula for the other two; these are ours:
    'exponential' is `(e^(5 t / T) - 1) / (e^5 - 1)`, 'sigmoid' the part of a tanh from -3 to 3. `updates` is t, `()`
    int64, and `warmup_iters` T; the result is `()` float64.
    """
    if warmup_iters == 0:
        return torch.ones_like(updates, dtype=torch.float64)
    share = (updates.double() / warmup_iters).clamp(max=1)  # each sublayer computes it: few operations
    if schedule == 'exponential':
        share = torch.expm1(5 * share) / torch.expm1(torch.full_like(share, 5))
    elif schedule == 'sigmoid':
        share = (1 + torch.tanh(6 * share - 3) / torch.tanh(torch.full_like(share, 3))) / 2
    return share
