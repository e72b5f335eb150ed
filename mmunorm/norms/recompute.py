"""Activation checkpointing: which training step a recomputed forward pass belongs to."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from ..compat import in_backward_pass
from .algorithm import Step

# Forward passes that wait for their backward pass; more happen where none ever comes.
_MAX_PENDING = 64


class PendingSteps:
    """The steps of one norm whose backward pass may still come, oldest first."""

    def __init__(self):
        self._steps: deque[Step] = deque(maxlen=_MAX_PENDING)
        self._backward_passes = 0
        self._recalled: Tensor | None = None  # (n,) how often each of the n oldest was

    @property
    def newest(self) -> Step | None:
        """The newest step, or None before the first."""
        return self._steps[-1] if self._steps else None

    def step(self, new: Callable[[], Step], measure: Callable[[], Tensor]) -> Step:
        """The step of a forward pass.

        Args:
            new: makes a new step, which changes the state.
            measure: only measures, and must give what it gave the first time.
        """
        if self._steps and in_backward_pass():
            return self._recall(measure)
        step = new()
        self._append(step)
        return step

    def note_backward_pass(self) -> None:
        """Counts a backward pass."""
        self._backward_passes += 1

    def _append(self, step: Step) -> None:
        """Adds a new step; forgets the earlier ones unless any waits."""
        if self._backward_passes >= len(self._steps):
            self.__init__()
        elif len(self._steps) == _MAX_PENDING:  # the oldest goes
            self._backward_passes = max(0, self._backward_passes - 1)
            self._recalled = None if self._recalled is None else self._recalled[1:]
        self._steps.append(step)

    def _recall(self, measure: Callable[[], Tensor]) -> Step:
        """The step that measured the same. Of several, the newest among the least often recalled.

        A backward pass recomputes the newest first. Waits for no tensor's value.
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
