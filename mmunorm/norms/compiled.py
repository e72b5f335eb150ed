"""A training step under `torch.compile`: two operators, one forward and one backward, that the compiler does
not look into.

At run time they call the norm's own methods, on `(C,)` tensors. So nothing of the state is in the graph, and
a forward that is computed again, by activation checkpointing around compiled code, is seen as without a
compiler. Inside of compiled code checkpointing keeps their results.
"""
from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import EffectType
from torch.utils.checkpoint import CheckpointPolicy, _CachingTorchDispatchMode

from .steps import Step

if TYPE_CHECKING:
    from .offline import OfflineNorm

_norms: WeakValueDictionary[int, OfflineNorm] = WeakValueDictionary()
_numbers = count()


def register(norm: OfflineNorm) -> Tensor:
    """A number by which the operators find `norm`, `()` on the CPU: a tensor, so that norms share a graph."""
    number = next(_numbers)
    _norms[number] = norm
    return torch.tensor(number, device='cpu')


def begin_step(number: Tensor, measured: Tensor, tokens: int | Tensor) -> Step:
    """The registered norm's `begin_step`; what the step does not have is filled with anything."""
    if not isinstance(tokens, Tensor):
        tokens = measured.new_full((), tokens)
    return Step(*_begin_step(number, measured, tokens))


def average_gradient(number: Tensor, step: Step, g: Tensor,
                     g_mean: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The registered norm's `average_gradient` for a step of :func:`begin_step`."""
    used = _average_gradient(number, list(step[:_FILLED]), g, g_mean)
    return used[0], (None if g_mean is None else used[1])


# `number` comes first because inductor takes the device of the first tensor for the operator's, and keeps
# those of a CPU out of CUDA graphs. These would replay kernels without what Python decides.
@torch.library.custom_op('mmunorm::begin_step', mutates_args=())
def _begin_step(number: Tensor, measured: Tensor, tokens: Tensor) -> list[Tensor]:
    # A compiler writes over what it needs no more: the norm keeps nothing of what came or goes.
    step = _find(number).begin_step(measured.clone, tokens)
    return [blank if value is None else value.to(blank.dtype, copy=True)
            for value, blank in zip(step, _blank_step(measured), strict=False)]


@torch.library.custom_op('mmunorm::average_gradient', mutates_args=())
def _average_gradient(number: Tensor, step: list[Tensor], g: Tensor, g_mean: Tensor | None) -> list[Tensor]:
    norm = _find(number)
    used = norm.average_gradient(norm.parts_of(Step(*step)), g, g_mean)
    return [value.to(g.dtype, copy=True) for value in used if value is not None]


@_begin_step.register_fake
def _(number, measured, tokens):
    return _blank_step(measured)


@_average_gradient.register_fake
def _(number, step, g, g_mean):
    return [torch.empty_like(value) for value in (g, g_mean) if value is not None]


# Otherwise a compiler would make one of two equal calls, and none of one whose result has no use.
for _operator in (_begin_step, _average_gradient):
    _operator.register_effect(EffectType.ORDERED)


@_begin_step.register_torch_dispatch(_CachingTorchDispatchMode)
def _(mode, operator, types, args, kwargs):
    """Within checkpointing: results are saved, whatever the policy is for the rest."""
    policy, mode.policy_fn = mode.policy_fn, lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE
    try:
        return mode.__torch_dispatch__(operator, types, args, kwargs)
    finally:
        mode.policy_fn = policy


def _find(number: Tensor) -> OfflineNorm:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError('an offline norm cannot be captured in a CUDA graph once it is compiled: take a '
                           "mode of torch.compile without them, such as 'default'")
    return _norms[int(number)]


# Of `Step`'s parts: all but the mean, which only a centered norm has, and what the norm keeps to itself.
_FILLED = Step._fields.index('mean')


def _blank_step(measured: Tensor) -> list[Tensor]:
    """Uninitialized tensors for the parts of a step, in order; the mean with `measured` of `(2, C)`."""
    vector = measured[0]
    blank = Step(var_hat=torch.empty_like(vector),
                 t=vector.new_empty((), dtype=torch.long),
                 s=torch.empty_like(vector),
                 outlier=vector.new_empty((), dtype=torch.bool),
                 averaged=vector.new_empty((), dtype=torch.bool),
                 share=vector.new_empty(()),
                 mean=torch.empty_like(vector))
    return list(blank[:_FILLED + (len(measured) == 2)])
