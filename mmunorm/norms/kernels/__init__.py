"""How the numbers of an offline norm are computed: Triton on a GPU, plain torch (`reference`) elsewhere.

Under `torch.compile` it is always plain torch, which the compiler fuses. Plain torch also computes what the Triton
kernels do not support: float64, strided or empty input, and averages other than UN's own.
"""
from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ...compat import is_compiling
from . import reference
from .reference import count_tokens, num_tokens, statistics_dtype, variance_and_mean

# Triton unrolls its loops over the steps of a record.
_LONGEST_RECORD = 32


@cache
def triton_kernels() -> ModuleType | None:
    """The module of the Triton kernels, imported on the first use of a GPU; None if Triton is not installed."""
    try:
        return import_module('.triton', __name__)
    except ImportError:
        return None


def triton_for(*tokens: Tensor) -> ModuleType | None:
    """The Triton kernels, if they support these inputs `(..., C)`; None for plain torch."""
    if is_compiling() or not all(x.is_cuda and x.dtype != torch.float64 and x.numel() and x.is_contiguous()
                                 for x in tokens):
        return None
    return triton_kernels()


def fused_update(record: Tensor, statistic: Tensor) -> ModuleType | None:
    """The Triton kernels, if they compute UN's averages over this record `(M, C)`; None for plain torch."""
    if (is_compiling() or not record.is_cuda or len(record) > _LONGEST_RECORD
            or not record.dtype == statistic.dtype == torch.float32):
        return None
    return triton_kernels()


def second_moment(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """See :func:`.reference.second_moment`."""
    return (triton_for(x) or reference).second_moment(x, valid)


def gradient_sums(dy: Tensor, x: Tensor, rstd: Tensor, mean: Tensor | None = None,
                  valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`.reference.gradient_sums`."""
    return (triton_for(dy, x) or reference).gradient_sums(dy, x, rstd, mean, valid)


def input_gradient(dy: Tensor, x: Tensor, direct: Tensor, psi: Tensor, rstd: Tensor, constant: Tensor | None = None,
                   valid: Tensor | None = None) -> Tensor:
    """See :func:`.reference.input_gradient`."""
    return (triton_for(dy, x) or reference).input_gradient(dy, x, direct, psi, rstd, constant, valid)


__all__ = ['count_tokens', 'fused_update', 'gradient_sums', 'input_gradient', 'num_tokens', 'second_moment',
           'statistics_dtype', 'triton_for', 'triton_kernels', 'variance_and_mean']
