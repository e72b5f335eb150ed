"""How the numbers of an offline norm are computed: Triton on a GPU, plain torch (`reference`) elsewhere.

Under `torch.compile` it is always plain torch, which the compiler fuses. What Triton is not made for goes to plain
torch too: float64, strided input, and averages other than UN's own.
"""
from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...compat import is_compiling
from . import reference
from .reference import num_tokens, statistics_dtype

# Triton unrolls its loops over the steps of a record.
LONGEST_RECORD = 32


@cache
def _triton() -> ModuleType | None:
    """Triton's kernels, imported when a GPU first asks; None where Triton is not installed."""
    try:
        return import_module('.triton', __name__)
    except ImportError:
        return None


def _passes(*tensors: Tensor) -> ModuleType:
    """The module that passes over these tokens, `(..., C)`."""
    if (is_compiling() or not tensors[0].is_cuda or tensors[0].dtype == torch.float64
            or not all(tensor.is_contiguous() for tensor in tensors)):
        return reference
    return _triton() or reference


def one_launch(record: Tensor, *vectors: Tensor) -> ModuleType | None:
    """Triton's averages over steps, if they take this record `(M, C)` and these vectors `(C,)`; else None."""
    if is_compiling() or len(record) > LONGEST_RECORD:
        return None
    fits = all(vector.is_cuda and vector.dtype == torch.float32 and vector.is_contiguous()
               for vector in (record, *vectors))
    return _triton() if fits else None


def mark_changed(*tensors: Tensor | None) -> None:
    """Tells autograd which tensors a kernel of :func:`one_launch` has changed."""
    for tensor in tensors:
        if tensor is not None:
            increment_version(tensor)


def second_moment(x: Tensor, valid: Tensor | None = None) -> Tensor:
    return _passes(x).second_moment(x, valid)


def variance_and_mean(x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _passes(x).variance_and_mean(x, valid)


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _passes(x).affine(x, scale, shift)


def gradient_statistics(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None = None,
                        valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return _passes(dy, x).gradient_statistics(dy, x, weight, rstd, mean, valid)


def input_gradient(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, psi: Tensor,
                   mean: Tensor | None = None, g_mean: Tensor | None = None, eta: Tensor | None = None,
                   valid: Tensor | None = None) -> Tensor:
    return _passes(dy, x).input_gradient(dy, x, weight, rstd, psi, mean, g_mean, eta, valid)


for _function in (second_moment, variance_and_mean, affine, gradient_statistics, input_gradient):
    _function.__doc__ = getattr(reference, _function.__name__).__doc__

__all__ = [
    'LONGEST_RECORD', 'affine', 'gradient_statistics', 'input_gradient', 'mark_changed', 'num_tokens', 'one_launch',
    'second_moment', 'statistics_dtype', 'variance_and_mean'
]
