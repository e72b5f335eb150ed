"""How the numbers of the offline norms are computed.

The functions of :mod:`.reference`, each by the fastest implementation that takes its input: `cpu` out of fused
operators of torch, otherwise the reference itself. Under `torch.compile` it is always the
reference, which the compiler fuses.
"""
from __future__ import annotations

import torch
from torch import Tensor

from . import cpu, reference
from .reference import bessel_correction, statistics_dtype


def _kernels(*tensors: Tensor):
    """The module that computes with these tensors, `(..., C)`."""
    if torch.compiler.is_compiling():
        return reference
    if all(tensor.is_contiguous() and tensor.device.type == 'cpu' for tensor in tensors):
        return cpu
    return reference


def second_moment(x: Tensor, valid: Tensor | None = None) -> Tensor:
    return _kernels(x).second_moment(x, valid)


def variance_and_mean(x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _kernels(x).variance_and_mean(x, valid)


def normalize_forward(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _kernels(x).normalize_forward(x, scale, shift)


def normalize_backward(dy: Tensor, x: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return _kernels(dy, x).normalize_backward(dy, x, *args, **kwargs)


def normalize_input_gradient(dy: Tensor, x: Tensor, *args, **kwargs) -> Tensor:
    return _kernels(dy, x).normalize_input_gradient(dy, x, *args, **kwargs)


for _function in (second_moment, variance_and_mean, normalize_forward, normalize_backward,
                  normalize_input_gradient):
    _function.__doc__ = getattr(reference, _function.__name__).__doc__

__all__ = [
    'bessel_correction', 'normalize_backward', 'normalize_forward', 'normalize_input_gradient',
    'second_moment', 'statistics_dtype', 'variance_and_mean'
]
