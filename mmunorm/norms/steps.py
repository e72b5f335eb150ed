"""Training steps that wait for their backward pass, and which of them a recomputed forward belongs to."""
from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Forward passes that wait for their backward pass; more happen where none ever comes.
_MAX_PENDING = 64


def in_backward_pass() -> bool:
    """Whether autograd runs one in this thread, where a forward pass is a recomputed one."""
    if torch._C._current_graph_task_id() != -1:
        return True
    compiled_autograd = sys.modules.get('torch._dynamo.compiled_autograd')  # expensive to import
    return compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region


class Step(NamedTuple):
    """What the forward pass of one training step measured and decided; tensors of shape `(C,)` or `()`."""
    var_hat: Tensor  # (C,)
    s: Tensor | None = None  # (C,) the mean square, finite; of backward_average='nu'
    outlier: Tensor | None = None  # () bool: every average is dropped for this step; with the filter
    averaged: Tensor | None = None  # () bool: settled, and no outlier; None where nothing is averaged
    share: Tensor | None = None  # () this rank's part of all ranks' tokens; of a synchronized norm
    mean: Tensor | None = None  # (C,); of a centered norm
    t: Tensor | None = None  # () number of the step, from 1; of a centered norm
    measured: Tensor | None = None  # (1, C) this rank's mean square, or (2, C) variance and mean, as they are

    def map_at_once(self, function: Callable[[Tensor], Tensor]) -> Step:
        """The step with its values passed through a function as one vector, in the dtype of `var_hat`."""
        values = [value for value in self if value is not None]
        packed = function(torch.cat([value.to(self.var_hat.dtype).flatten() for value in values]))
        parts = iter(packed.split([value.numel() for value in values]))
        return Step(*(None if value is None else next(parts).view_as(value).to(value.dtype)
                      for value in self))


class PendingSteps:
    """The steps of one norm whose backward pass may still come, oldest first."""

    def __init__(self):
        self._steps: deque[Step] = deque(maxlen=_MAX_PENDING)
        self._backward_passes = 0
        self._recalled: Tensor | None = None  # (n,) how often each of the n oldest was

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def newest(self) -> Step | None:
        return self._steps[-1] if self._steps else None

    def wait(self) -> bool:
        """Whether a backward pass is due: fewer have run than there are steps."""
        return self._backward_passes < len(self._steps)

    def append(self, step: Step) -> None:
        """Adds a new step; forgets the earlier ones unless any waits."""
        if not self.wait():
            self.__init__()
        elif len(self._steps) == _MAX_PENDING:  # the oldest goes
            self._backward_passes = max(0, self._backward_passes - 1)
            self._recalled = None if self._recalled is None else self._recalled[1:]
        self._steps.append(step)

    def note_backward_pass(self) -> None:
        self._backward_passes += 1

    def recall(self, measure: Callable[[], Tensor]) -> Step:
        """The step that a recomputed forward pass, which measures the same again, belongs to.

        Of those that measured the same the newest among the least often recalled: a backward pass recomputes
        the newest first. Waits for no tensor's value.
        """
        if len(self._steps) == 1:
            return self._steps[0]
        measured = measure()
        known = torch.stack([step.measured for step in self._steps])
        same = (known == measured) | (known.isnan() & measured.isnan())
        # The nearest, because a compiler may round the recomputed forward differently.
        distance = torch.where(same, 0, (known - measured).abs().nan_to_num(nan=torch.inf)).sum(dim=(1, 2))
        recalled = torch.zeros(len(known), dtype=torch.long, device=known.device)
        if self._recalled is not None:
            recalled[:len(self._recalled)] = self._recalled
        times = recalled.masked_fill(distance != distance.min(), torch.iinfo(torch.long).max)
        newest_first = (times == times.min()).int().flip(0)
        index = len(known) - 1 - newest_first.argmax().view(1)
        self._recalled = recalled.index_add_(0, index, torch.ones_like(index))
        return Step(*(None if values[0] is None else torch.stack(values).index_select(0, index)[0]
                      for values in zip(*self._steps, strict=True)))
