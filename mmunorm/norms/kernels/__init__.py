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

# Triton unrolls its loops over the steps of a record.
_LONGEST_RECORD = 32


@cache
def triton_kernels() -> ModuleType | None:
    """The module of the Triton kernels, imported on the first use of a GPU; None if Triton is not installed."""
    try:
        return import_module('.triton', __name__)
    except ImportError:
        return None


def triton_passes(*tokens: Tensor) -> ModuleType | None:
    """The Triton kernels, if they support these inputs `(..., C)`; None otherwise."""
    if is_compiling() or not all(x.is_cuda and x.dtype != torch.float64 and x.numel() and x.is_contiguous()
                                 for x in tokens):
        return None
    return triton_kernels()


def kernels_for(*tokens: Tensor) -> ModuleType:
    """The module with the passes over these inputs `(..., C)`: the Triton kernels if they support them."""
    return triton_passes(*tokens) or reference


def fused_update(dtype: torch.dtype, *records: Tensor) -> ModuleType | None:
    """The Triton kernels, if they compute UN's averages over these records `(M, C)` of statistics; None otherwise."""
    if is_compiling() or not all(record.is_cuda and len(record) <= _LONGEST_RECORD
                                 and record.dtype == dtype == torch.float32 for record in records):
        return None
    return triton_kernels()
