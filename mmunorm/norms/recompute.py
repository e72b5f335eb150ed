"""Activation checkpointing: a forward pass that is computed again is the training step it was."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compat import in_backward_pass, is_compiling
from .step import Step, kept_for_backward

# The most steps that one norm keeps.
_MAX_PENDING = 64
# A step without a graph is given up after so many later ones had their backward passes.
_PATIENCE = 8


@dataclass(eq=False)
class _Pending:
    """A step whose backward pass may still come."""
    step: Step
    # To the graph of the forward pass. None if there is none: reentrant checkpointing makes it later, and cannot be
    # distinguished from `torch.no_grad()`.
    graph: weakref.ref | None = None
    done: bool = False  # the backward pass has come
    overtaken: int = 0  # how many later steps were done before

    def is_waiting(self) -> bool:
        """Whether the backward pass may still come."""
        if self.done:
            return False
        return self.overtaken < _PATIENCE if self.graph is None else self.graph() is not None


class PendingSteps:
    """The steps of one norm whose backward pass may still come, oldest first; a forward pass drops the others."""

    def __init__(self):
        self._pending: list[_Pending] = []
        self._recalled: Tensor | None = None  # (n,) how often each of the n oldest was
        self._recalls = 0  # in all

    def __reduce__(self):
        return PendingSteps, ()  # a copy is not part of the passes in progress

    def step(self, new: Callable[[], Step], measure: Callable[[], Tensor]) -> Step:
        """The step of a forward pass: `new()`, or in a recomputed one the step that measured the same."""
        if is_compiling():
            return kept_for_backward(new())
        if self._pending and in_backward_pass():
            return self._recall(measure)
        step = new()
        self._drop_finished()
        self._pending.append(_Pending(step))
        return step

    def watch(self, step: Step, y: Tensor) -> None:
        """Notes the graph of the step's forward pass, whose output is `y`."""
        if is_compiling() or not torch.is_grad_enabled():
            return
        # None if the step comes from compiled code, which torch 2.1 leaves at the function of the norm.
        newest = self._pending[-1] if self._pending else None
        if newest is not None and newest.step is step and newest.graph is None:
            newest.done = not y.requires_grad
            newest.graph = weakref.ref(y.grad_fn) if y.requires_grad else None

    def note_backward_pass(self, step: Step) -> None:
        """Notes the backward pass of a step that :meth:`step` returned."""
        pending = None if is_compiling() else next((other for other in self._pending if other.step is step), None)
        if pending is not None:
            pending.done = True

    def _drop_finished(self) -> None:
        """Drops the steps whose backward pass cannot come any more."""
        if not self._recalls and all(pending.done for pending in self._pending):  # as in most trainings
            self._pending.clear()
            return
        without_graph = [pending for pending in self._pending if pending.graph is None and not pending.done]
        if without_graph and self._recalls >= len(self._pending):
            for pending in without_graph:
                pending.done = True
        elif without_graph and self._recalls:  # synchronizes, but is rare: a pipeline, or passes without backward
            for pending, times in zip(self._pending, self._recalled.tolist(), strict=False):
                pending.done |= times > 0
        later = 0
        for pending in reversed(self._pending):
            pending.overtaken += later
            later += pending.done
        waiting = [pending for pending in self._pending if pending.is_waiting()][1 - _MAX_PENDING:]
        if len(waiting) < len(self._pending):
            self._recalled, self._recalls = None, 0
        self._pending = waiting

    def _recall(self, measure: Callable[[], Tensor]) -> Step:
        """The step that measured the same; of several, the newest among the least often recalled.

        A backward pass recomputes the newest first. The method does not synchronize with the device.
        """
        if len(self._pending) == 1:
            return self._pending[0].step
        measured = measure()
        steps = [pending.step for pending in self._pending]
        known = torch.stack([step.measured for step in steps])
        same = (known == measured) | (known.isnan() & measured.isnan())
        # The nearest, because a compiler may round the recomputed forward differently.
        distance = torch.where(same, 0, (known - measured).abs().nan_to_num(nan=torch.inf)).flatten(1).sum(dim=1)
        recalled = torch.zeros(len(known), dtype=torch.long, device=known.device)
        if self._recalled is not None:
            recalled[:len(self._recalled)] = self._recalled
        times = recalled.masked_fill(distance != distance.min(), torch.iinfo(torch.long).max)
        newest_first = (times == times.min()).int().flip(0)
        index = len(known) - 1 - newest_first.argmax().view(1)
        self._recalled = recalled.index_add_(0, index, torch.ones_like(index))
        self._recalls += 1
        if index.device.type == 'cpu':  # where nothing has to be waited for
            return steps[index.numpy().item()]
        return Step(*(None if values[0] is None else torch.stack(values).index_select(0, index)[0]
                      for values in zip(*steps, strict=True)))
