"""The one thing that a training step needs under torch.compile: values that stay as they were."""
from __future__ import annotations

import torch
from torch import Tensor

from ..compat import in_backward_pass
from .algorithm import Step

# A compiled backward pass may compute a value again, from a buffer that the forward pass has changed since. The
# result of an operator of unknown content is stored instead. (torch.library.custom_op takes twice as long a call.)
_OPERATORS = torch.library.Library('mmunorm', 'FRAGMENT')
_OPERATORS.define('keep_for_backward(Tensor values) -> Tensor')


@torch.library.impl(_OPERATORS, 'keep_for_backward', 'CompositeExplicitAutograd')
def _keep_for_backward(values: Tensor) -> Tensor:
    # In compiled code nothing else sees a recomputed forward before that changes the state.
    if in_backward_pass():
        raise RuntimeError('activation checkpointing computes a compiled offline norm a second time, which '
                           'would count its step twice: train without checkpointing (with_cp=False), or '
                           'without torch.compile')
    return values.clone()


@torch.library.impl(_OPERATORS, 'keep_for_backward', 'Meta')
def _shape_of_kept(values: Tensor) -> Tensor:
    return torch.empty_like(values)


def keep(step: Step) -> Step:
    """The same values, which no compiler computes again; without `measured`, which only a recomputed pass asks for."""
    values = step[:-1]  # as one vector, in the dtype of `var_hat`
    kept = [value for value in values if value is not None]
    packed = torch.cat([value.to(step.var_hat.dtype).flatten() for value in kept])
    parts = iter(torch.ops.mmunorm.keep_for_backward(packed).split([value.numel() for value in kept]))
    return Step(*(None if value is None else next(parts).view_as(value).to(value.dtype) for value in values))
