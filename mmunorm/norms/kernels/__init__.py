"""How the numbers of the offline norms are computed.

The functions of :mod:`.reference`, by the fastest module that takes the input: `triton` for a GPU, `native`
in C or `cpu` out of fused operators of torch for a CPU, or the reference itself. Under `torch.compile` it
is always the reference, which the compiler fuses. Where `native` takes all of a step without a mean, that
is one call of it forward and one backward: `step_forward` and `step_backward`.
"""
from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import cpu, native, reference
from .reference import statistics_dtype


@cache
def _triton() -> ModuleType | None:
    """Triton's kernels, imported when a GPU first asks; None where Triton is not installed."""
    try:
        return import_module('.triton', __name__)
    except ImportError:
        return None


def _kernels(*tensors: Tensor) -> ModuleType:
    """The module that computes with these tensors, `(..., C)`."""
    if torch.compiler.is_compiling() or not all(tensor.is_contiguous() for tensor in tensors):
        return reference
    device = tensors[0].device.type
    if device == 'cpu':
        if not tensors[0].numel():  # BatchNorm's kernel dies of no tokens
            return reference
        return native if native.takes(*tensors) else cpu
    if device == 'cuda' and tensors[0].dtype != torch.float64:
        return _triton() or reference
    return reference


# Triton unrolls its loops over the steps of a record.
_LONGEST_FOR_TRITON = 32


def _fit(channels: torch.Size, like: Tensor, vectors: tuple[Tensor | None, ...], record: Tensor | None,
         counters: tuple[Tensor | None, ...] = ()) -> bool:
    """Whether vectors `(C,)`, a record `(M, C)` and counters `()`, long and where `like` is, fit together."""
    for vector in vectors:
        if vector is not None and vector.shape != channels:
            return False
    for counter in counters:
        if counter is not None and (counter.dtype != torch.int64 or counter.device != like.device
                                    or counter.numel() != 1):
            return False
    return record is None or record.shape[1:] == channels


def _step_kernels(values: Tensor, vectors: tuple[Tensor | None, ...], record: Tensor | None,
                  counters: tuple[Tensor | None, ...] = ()) -> ModuleType:
    """The module that computes the per-channel part of a step with these `(C,)` values.

    What it is not made for, such as state of another dtype or size, is left to the reference.
    """
    if torch.compiler.is_compiling() or not _fit(values.shape, values, vectors, record, counters):
        return reference
    if not values.is_cuda:
        return native if native.takes(values, *vectors, record) else reference
    fits = all(tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.is_cuda)
               for tensor in (values, *vectors, record))
    fits = fits and (record is None or len(record) <= _LONGEST_FOR_TRITON)
    return fits and _triton() or reference


def takes_whole_steps(x: Tensor, weight: Tensor, bias: Tensor, running_var: Tensor, record: Tensor | None,
                      num_outliers: Tensor | None, num_batches_tracked: Tensor) -> bool:
    """Whether `step_forward` computes with these."""
    vectors, counters = (weight, bias, running_var), (num_outliers, num_batches_tracked)
    return (x.is_cpu and x.numel() > 0 and _fit(x.shape[-1:], x, vectors, record, counters)
            and native.takes(x, *vectors, record))


def step_forward(x: Tensor, weight: Tensor, bias: Tensor, running_var: Tensor, record: Tensor | None,
                 num_outliers: Tensor | None, num_batches_tracked: Tensor, **config):
    """`second_moment`, `advance` and `normalize_forward` of the next training step, by `native`.

    Args:
        num_batches_tracked: `()` long, steps before this one; changed in place.
        config: that of `advance`, `eps`, and `needs_s`, whether `advance`'s first result is wanted.

    Returns:
        `y`, `rstd` `(C,)`, the mean square as it was measured, `(1, C)`, and what `advance` returns.
    """
    results = native.step_forward(x, weight, bias, running_var, record, num_outliers, num_batches_tracked,
                                  **config)
    _mark_changed(native, num_batches_tracked, running_var, record, num_outliers)
    return results


def step_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, psi: Tensor, record: Tensor | None,
                  outlier: Tensor | None, averaged: Tensor, s: Tensor | None, var_hat: Tensor, needs_dx: bool,
                  **config):
    """`normalize_backward`, `average_gradient` and `normalize_input_gradient` by `native`; None if it cannot.

    Args:
        needs_dx: whether `dx` is wanted.
        config: that of `average_gradient`.

    Returns:
        `dx`, None if it is not wanted, `dweight` and `dbias`.
    """
    if (torch.compiler.is_compiling() or dy.shape != x.shape
            or not _fit(x.shape[-1:], x, (weight, rstd, psi), record)
            or not native.takes(dy, x, weight, rstd, psi, record)):
        return None
    results = native.step_backward(dy, x, weight, rstd, psi, record, outlier, averaged, s, var_hat,
                                   needs_dx=needs_dx, **config)
    _mark_changed(native, psi, record)
    return results


def second_moment(x: Tensor, valid: Tensor | None = None) -> Tensor:
    return _kernels(x).second_moment(x, valid)


def variance_and_mean(x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _kernels(x).variance_and_mean(x, valid)


def normalize_forward(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _kernels(x).normalize_forward(x, scale, shift)


def normalize_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None = None,
                       valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return _kernels(dy, x).normalize_backward(dy, x, weight, rstd, mean, valid)


def normalize_input_gradient(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, psi: Tensor,
                             mean: Tensor | None = None, g_mean: Tensor | None = None,
                             eta: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    return _kernels(dy, x).normalize_input_gradient(dy, x, weight, rstd, psi, mean, g_mean, eta, valid)


def advance(measured: Tensor, t: Tensor, running_var: Tensor, record: Tensor | None,
            num_outliers: Tensor | None, **config) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    kernels = _step_kernels(measured, (running_var, ), record, (t, num_outliers))
    results = kernels.advance(measured, t, running_var, record, num_outliers, **config)
    _mark_changed(kernels, running_var, record, num_outliers)
    return results


def average_gradient(g: Tensor, psi: Tensor, record: Tensor | None, outlier: Tensor | None, averaged: Tensor,
                     s: Tensor | None, var_hat: Tensor, **config) -> Tensor:
    kernels = _step_kernels(g, (psi, s, var_hat), record)
    used = kernels.average_gradient(g, psi, record, outlier, averaged, s, var_hat, **config)
    _mark_changed(kernels, psi, record)
    return used


def _mark_changed(kernels: ModuleType, *state: Tensor | None) -> None:
    """Tells autograd what a kernel has changed behind its back."""
    if kernels is not reference:
        increment_version([tensor for tensor in state if tensor is not None])


for _function in (second_moment, variance_and_mean, normalize_forward, normalize_backward,
                  normalize_input_gradient, advance, average_gradient):
    _function.__doc__ = getattr(reference, _function.__name__).__doc__

__all__ = [
    'advance', 'average_gradient', 'normalize_backward', 'normalize_forward', 'normalize_input_gradient',
    'second_moment', 'statistics_dtype', 'step_backward', 'step_forward', 'takes_whole_steps',
    'variance_and_mean'
]
