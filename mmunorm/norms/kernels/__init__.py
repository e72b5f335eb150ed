"""How the numbers of an offline norm are computed: Triton on a GPU, plain torch (`reference`) elsewhere.

Under `torch.compile` it is always plain torch, which the compiler fuses. Plain torch also computes what the Triton
kernels do not support: float64, strided or empty input, and averages other than UN's own.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ...compat import is_compiling
from . import reference
from .reference import num_tokens, statistics_dtype

# Triton unrolls its loops over the steps of a record.
_LONGEST_RECORD = 32


@cache
def _triton() -> ModuleType | None:
    """Triton's kernels, imported on the first use of a GPU; None if Triton is not installed."""
    try:
        return import_module('.triton', __name__)
    except ImportError:
        return None


def one_launch(record: Tensor, *vectors: Tensor) -> ModuleType | None:
    """Triton's averages over steps, if they support this record `(M, C)` and these vectors `(C,)`; else None."""
    if is_compiling() or len(record) > _LONGEST_RECORD:
        return None
    fits = all(vector.is_cuda and vector.dtype == torch.float32 and vector.is_contiguous()
               for vector in (record, *vectors))
    return _triton() if fits else None


def _pass(plain: Callable, inputs: int = 1) -> Callable:
    """A pass over tokens: in Triton if that supports the first arguments, `inputs` tensors `(..., C)`; else `plain`."""

    @wraps(plain)
    def run(*args):
        tokens = args[:inputs]
        if (is_compiling() or not tokens[0].is_cuda or tokens[0].dtype == torch.float64 or not tokens[0].numel()
                or not all(each.is_contiguous() for each in tokens)):
            return plain(*args)
        return getattr(_triton() or reference, plain.__name__)(*args)

    return run


second_moment = _pass(reference.second_moment)
variance_and_mean = _pass(reference.variance_and_mean)
affine = _pass(reference.affine)
gradient_statistics = _pass(reference.gradient_statistics, inputs=2)
input_gradient = _pass(reference.input_gradient, inputs=2)

__all__ = [
    'affine', 'gradient_statistics', 'input_gradient', 'num_tokens', 'one_launch', 'second_moment',
    'statistics_dtype', 'variance_and_mean'
]
