"""How the numbers of an offline norm are computed: a training step of UN on a GPU in Triton, all else in plain torch.

Under `torch.compile` it is always plain torch, which the compiler fuses.
"""
from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ...compat import is_compiling


@cache
def triton_kernels() -> ModuleType | None:
    """The module of the Triton kernels, imported on the first use of a GPU; None if Triton is not installed."""
    try:
        return import_module('.triton', __name__)
    except ImportError:
        return None


def triton_for(norm, x: Tensor, valid: Tensor | None) -> ModuleType | None:
    """The Triton kernels, if they compute a training step of an offline norm on tokens `x`; None for plain torch."""
    if (not norm.has_triton_kernels or is_compiling() or not x.is_cuda or x.dtype == torch.float64 or valid is not None
            or norm.running_var.dtype == torch.float64 or norm.is_distributed):
        return None
    return triton_kernels()
