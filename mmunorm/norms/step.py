"""What the forward pass of a training step leaves for its backward pass, also in compiled code."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..compat import in_backward_pass


class Step(NamedTuple):
    """What the forward pass of one training step measured and decided; None if the norm does not need it."""
    rstd: Tensor  # (C,) 1 / sqrt(var_hat + eps)
    averaged: Tensor  # () bool: after the warm-up, and no outlier
    outlier: Tensor | None = None  # () bool: the step ignores all averages
    s: Tensor | None = None  # (C,) the statistic, finite
    mean: Tensor | None = None  # (C,) mu_hat; of a centered norm
    share: Tensor | None = None  # () this process's share of all tokens; of a synchronized norm
    t: Tensor | None = None  # () number of the step, from 1; of a norm that changes with it
    measured: Tensor | None = None  # the statistics over tokens, of this process alone
    scale: Tensor | None = None  # (C,) weight * rstd, if a kernel computes it beside rstd


# A compiled backward pass may compute a value again, from a buffer that the forward pass has changed since. So compiled
# code stores the result of an opaque operator. (torch.library.custom_op takes twice as long a call.)
_OPERATORS = torch.library.Library('mmunorm', 'FRAGMENT')
_OPERATORS.define('keep_for_backward(Tensor values) -> Tensor')


@torch.library.impl(_OPERATORS, 'keep_for_backward', 'CompositeExplicitAutograd')
def _keep_for_backward(values: Tensor) -> Tensor:
    # In compiled code, nothing else detects a recomputed forward pass before it changes the state.
    if in_backward_pass():
        raise RuntimeError('activation checkpointing computes a compiled offline norm a second time, which '
                           'would count its step twice: train without checkpointing (with_cp=False), or '
                           'without torch.compile')
    return values.clone()


@torch.library.impl(_OPERATORS, 'keep_for_backward', 'Meta')
def _shape_of_kept(values: Tensor) -> Tensor:
    return torch.empty_like(values)


def kept_for_backward(step: Step) -> Step:
    """A step whose values compiled code stores for the backward pass."""
    kept = [value for value in step if value is not None]
    packed = torch.cat([value.to(step.rstd.dtype).flatten() for value in kept])  # in one operation
    parts = iter(torch.ops.mmunorm.keep_for_backward(packed).split([value.numel() for value in kept]))
    return Step(*(None if value is None else next(parts).view_as(value).to(value.dtype) for value in step))
