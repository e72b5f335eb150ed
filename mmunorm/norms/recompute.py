"""Activation checkpointing: a forward pass that is computed again is the training step it was."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compat import in_backward_pass, is_compiling
from .step import Step, kept_for_backward

# The most steps that one norm keeps. A step without a graph, as of `torch.no_grad()`, is kept until it is the oldest.
_MAX_PENDING = 64


@dataclass(eq=False)
class _Pending:
    """A step whose backward pass may still come."""
    step: Step
    # To the graph of the forward pass. None if there is none: reentrant checkpointing makes it later, and cannot be
    # distinguished from `torch.no_grad()`.
    graph: weakref.ref | None = None
    recalls: int = 0  # how often the forward pass was recomputed
    done: bool = False  # the backward pass has come


class PendingSteps:
    """The steps of one norm whose backward pass may still come, oldest first; a forward pass drops the others."""

    def __init__(self):
        self._pending: list[_Pending] = []

    def __reduce__(self):
        return PendingSteps, ()  # a copy is not part of the passes in progress

    def step(self, new: Callable[[], Step], measure: Callable[[], Tensor]) -> Step:
        """The step of a forward pass: `new()`, or in a recomputed one the step that measured the same."""
        if is_compiling():
            return kept_for_backward(new())
        if self._pending and in_backward_pass():
            return self._recall(measure)
        step = new()
        waiting = [pending for pending in self._pending if not pending.done
                   and (pending.graph is None or pending.graph() is not None)]
        self._pending = [*waiting[1 - _MAX_PENDING:], _Pending(step)]
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
        for pending in () if is_compiling() else self._pending:
            pending.done |= pending.step is step

    def _recall(self, measure: Callable[[], Tensor]) -> Step:
        """The step that measured the same; of several, the newest among the least often recalled.

        A backward pass recomputes the newest first. The method synchronizes with the device only if several steps wait.
        """
        if len(self._pending) == 1:
            return self._pending[0].step
        measured = measure()
        known = torch.stack([pending.step.measured for pending in self._pending])
        same = (known == measured) | (known.isnan() & measured.isnan())
        # The nearest, because a compiler may round the recomputed forward differently.
        distances = torch.where(same, 0, (known - measured).abs().nan_to_num(nan=torch.inf)).flatten(1).sum(dim=1)
        newest_first = zip(reversed(distances.tolist()), reversed(self._pending), strict=True)
        _, recalled = min(newest_first, key=lambda pair: (pair[0], pair[1].recalls))
        recalled.recalls += 1
        return recalled.step
