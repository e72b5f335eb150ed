"""The reference's functions in C for a CPU (native.c): one pass over tokens each, and a step's per-channel
part in one call.

setup.py builds the library where it finds a C compiler; without it `cpu` computes. Tokens are contiguous
float32, and so is every per-channel tensor that is changed in place.
"""
from __future__ import annotations

import ctypes
import warnings
from ctypes import c_double, c_int, c_int64, c_ssize_t, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from . import cpu, reference

# Of the functions' arguments; native.c has the same.
_VERSION = 1
_AVERAGES = {name: number for number, name in enumerate(('current', 'gm', 'am', 'ema', 'earlier_ema', 'nu'))}

_TOKENS = (c_ssize_t, c_ssize_t, c_int)  # how many, of how many channels, and threads
_ARGUMENTS = dict(
    second_moment=(c_void_p, *_TOKENS, c_void_p),
    variance_and_mean=(c_void_p, *_TOKENS, c_void_p, c_void_p),
    affine=(*[c_void_p] * 3, *_TOKENS, c_void_p),
    normalize_backward=(*[c_void_p] * 5, *_TOKENS, *[c_void_p] * 4),
    normalize_input_gradient=(*[c_void_p] * 8, *_TOKENS, c_void_p),
    advance=(*[c_void_p] * 5, c_ssize_t, c_ssize_t, c_int, c_int, c_int64, c_double, *[c_void_p] * 4),
    average_gradient=(*[c_void_p] * 7, c_ssize_t, c_ssize_t, c_int, c_int, c_double, c_double),
)


@cache
def library() -> ctypes.CDLL | None:
    """The library; None where it was not built, or cannot be loaded."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f'_native{suffix}')
        if path.exists():
            break
    else:
        return None
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        warnings.warn(f'training on a CPU goes without {path}: {error}', stacklevel=2)
        return None
    if loaded.native_version() != _VERSION:
        warnings.warn(f'training on a CPU goes without {path}, which is of another version of mmunorm: '
                      'install it again (pip install -e .)', stacklevel=2)
        return None
    for name, types in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes = types
        function.restype = None if name == 'affine' else _check_memory
    return loaded


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError('no memory for the sums of a norm')


def takes(*tensors: Tensor | None) -> bool:
    """Whether these can be computed with here: contiguous float32 on a CPU, with memory of their own."""
    if library() is None:
        return False
    for tensor in tensors:
        if tensor is not None and (tensor.dtype is not torch.float32 or not tensor.is_cpu
                                   or not tensor.is_contiguous()
                                   # A subclass, such as a fake tensor, may have no memory.
                                   or type(tensor) not in (Tensor, nn.Parameter)):
            return False
    return True


def second_moment(x: Tensor, valid: Tensor | None = None) -> Tensor:
    if valid is not None:
        return cpu.second_moment(x, valid)
    square = x.new_empty(x.shape[-1])
    library().second_moment(x.data_ptr(), *_tokens(x), square.data_ptr())
    return square


def variance_and_mean(x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if valid is not None:
        return cpu.variance_and_mean(x, valid)
    variance, mean = x.new_empty(x.shape[-1]), x.new_empty(x.shape[-1])
    library().variance_and_mean(x.data_ptr(), *_tokens(x), variance.data_ptr(), mean.data_ptr())
    return variance, mean


def normalize_forward(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if torch.is_grad_enabled() or torch.jit.is_tracing() or not takes(scale, shift):
        return reference.normalize_forward(x, scale, shift)  # which can be differentiated and traced
    y = torch.empty_like(x)
    library().affine(x.data_ptr(), scale.data_ptr(), shift.data_ptr(), *_tokens(x), y.data_ptr())
    return y


def normalize_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None = None,
                       valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if valid is not None or not takes(weight, rstd, mean):
        return cpu.normalize_backward(dy, x, weight, rstd, mean, valid)
    sums = [torch.empty_like(rstd) for _ in range(3 if mean is None else 4)]
    pointers = [tensor.data_ptr() for tensor in sums]
    if mean is None:
        pointers.append(None)
        sums.append(None)
    library().normalize_backward(dy.data_ptr(), x.data_ptr(), weight.data_ptr(), rstd.data_ptr(),
                                 _pointer(mean), *_tokens(x), *pointers)
    return tuple(sums)


def normalize_input_gradient(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, psi: Tensor,
                             mean: Tensor | None = None, g_mean: Tensor | None = None,
                             eta: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    if valid is not None or not takes(weight, rstd, psi, mean, g_mean, eta):
        return cpu.normalize_input_gradient(dy, x, weight, rstd, psi, mean, g_mean, eta, valid)
    dx = torch.empty_like(x)
    library().normalize_input_gradient(
        dy.data_ptr(), x.data_ptr(), weight.data_ptr(), rstd.data_ptr(), psi.data_ptr(), _pointer(mean),
        _pointer(g_mean), _pointer(eta), *_tokens(x), dx.data_ptr())
    return dx


def advance(measured: Tensor, t: Tensor, running_var: Tensor, record: Tensor | None,
            num_outliers: Tensor | None, average: str, per_channel: bool, unsettled: int,
            alpha: float) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    s, var_hat = torch.empty_like(measured), torch.empty_like(measured)
    outlier = None if num_outliers is None else t.new_empty((), dtype=torch.bool)
    averaged = t.new_empty((), dtype=torch.bool)
    library().advance(
        measured.data_ptr(), running_var.data_ptr(), _pointer(record), _pointer(num_outliers), t.data_ptr(),
        len(measured), 1 if record is None else len(record), _AVERAGES[average], per_channel, unsettled,
        alpha, s.data_ptr(), var_hat.data_ptr(), _pointer(outlier), averaged.data_ptr())
    increment_version([state for state in (running_var, record, num_outliers) if state is not None])
    return s, var_hat, outlier, averaged


def average_gradient(g: Tensor, psi: Tensor, record: Tensor | None, outlier: Tensor | None, averaged: Tensor,
                     s: Tensor | None, var_hat: Tensor, average: str, momentum: bool, alpha: float,
                     eps: float) -> Tensor:
    used = g.clone()
    library().average_gradient(
        used.data_ptr(), psi.data_ptr(), _pointer(record), _pointer(outlier), averaged.data_ptr(),
        _pointer(s), var_hat.data_ptr(), len(g), 1 if record is None else len(record), _AVERAGES[average],
        momentum, alpha, eps)
    increment_version([state for state in (psi, record) if state is not None])
    return used


def _tokens(x: Tensor) -> tuple[int, int, int]:
    channels = x.shape[-1]
    return x.numel() // channels, channels, torch.get_num_threads()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
