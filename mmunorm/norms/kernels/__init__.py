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
from . import host, reference
from .reference import count_tokens, num_tokens, statistics_dtype

# Triton unrolls its loops over the steps of a record.
_LONGEST_RECORD = 32


@cache
def triton_kernels() -> ModuleType | None:
    """Triton's kernels, imported on the first use of a GPU; None if Triton is not installed."""
    try:
        return import_module('.triton', __name__)
    except ImportError:
        return None


def for_averages(record: Tensor) -> ModuleType | None:
    """What computes UN's own averages on the device of this record `(M, C)`; None for plain torch."""
    if is_compiling():
        return None
    if type(record) is Tensor and record.device.type == 'cpu':
        return host
    if len(record) > _LONGEST_RECORD or not (record.is_cuda and record.dtype == torch.float32):
        return None
    return triton_kernels()


def _pass(plain: Callable, inputs: int = 1) -> Callable:
    """A pass over tokens: in Triton if that supports the first arguments, `inputs` tensors `(..., C)`; else `plain`."""

    @wraps(plain)
    def run(*args):
        tokens = args[:inputs]
        if (is_compiling() or not tokens[0].is_cuda or tokens[0].dtype == torch.float64 or not tokens[0].numel()
                or not all(each.is_contiguous() for each in tokens)):
            return plain(*args)
        return getattr(triton_kernels() or reference, plain.__name__)(*args)

    return run


square_sum = _pass(reference.square_sum)
def second_moment(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """`s = mean over the valid tokens of x^2`, `(C,)`."""
    return square_sum(x, valid) / count_tokens(x, valid)


variance_and_mean = _pass(reference.variance_and_mean)
affine = _pass(reference.affine)
gradient_sums = _pass(reference.gradient_sums, inputs=2)
input_gradient = _pass(reference.input_gradient, inputs=2)

__all__ = [
    'affine', 'count_tokens', 'gradient_sums', 'input_gradient', 'num_tokens', 'for_averages', 'second_moment',
    'square_sum', 'statistics_dtype', 'variance_and_mean'
]
