"""The reference's functions in C for a CPU (native.c): one pass over tokens each, a step's per-channel part
in one call, and a whole step forward or backward in one call.

setup.py builds the library where it finds a C compiler; without it `cpu` computes. Tokens are contiguous
float32, and so is every per-channel tensor that is changed in place.
"""
from __future__ import annotations

import ctypes
import warnings
import zlib
from ctypes import c_double, c_int, c_int64, c_ssize_t, c_uint, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import cpu, reference

_SOURCE = Path(__file__).with_name('native.c')  # beside the library in an editable installation
# In the order of native.c.
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
    step_forward=(*[c_void_p] * 3, *_TOKENS, c_double, *[c_void_p] * 4, c_ssize_t, c_int, c_int, c_int64,
                  c_double, *[c_void_p] * 7),
    step_backward=(*[c_void_p] * 4, *_TOKENS, c_double, *[c_void_p] * 6, c_ssize_t, c_int, c_int, c_double,
                   *[c_void_p] * 3),
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
        loaded.native_source.restype = c_uint
        source = loaded.native_source()
    except (OSError, AttributeError) as error:
        warnings.warn(f'training on a CPU goes without {path}: {error}', stacklevel=2)
        return None
    if _SOURCE.exists() and source != zlib.crc32(_SOURCE.read_bytes()):
        warnings.warn(f'training on a CPU goes without {path}, which was made of another {_SOURCE.name}: '
                      'install the package again (pip install -e .)', stacklevel=2)
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
    if library() is None or _is_transformed():
        return False
    for tensor in tensors:
        if tensor is not None and (tensor.dtype is not torch.float32 or not tensor.is_cpu
                                   or not tensor.is_contiguous() or tensor.is_neg() or tensor._is_zerotensor()
                                   # A subclass, such as a fake tensor, may have no memory.
                                   or type(tensor) not in (Tensor, nn.Parameter)):
            return False
    return True


def _is_transformed() -> bool:
    """Whether operators are traced or replaced: by torch.func, forward-mode AD, a dispatch mode, torch.jit.

    Tensors may look like plain ones then, and what is done behind torch's back goes unseen.
    """
    return (torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._len_torch_dispatch_stack() > 0 or forward_ad._current_level >= 0
            or torch.jit.is_tracing())


def _takes_vectors(x: Tensor, *vectors: Tensor | None) -> bool:
    return takes(*vectors) and all(vector is None or vector.shape == x.shape[-1:] for vector in vectors)


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
    if torch.is_grad_enabled() or not _takes_vectors(x, scale, shift):
        return reference.normalize_forward(x, scale, shift)  # which can be differentiated
    y = torch.empty_like(x)
    library().affine(x.data_ptr(), scale.data_ptr(), shift.data_ptr(), *_tokens(x), y.data_ptr())
    return y


def normalize_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None = None,
                       valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if valid is not None or not _takes_vectors(x, weight, rstd, mean):
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
    if valid is not None or not (_takes_vectors(x, weight, rstd, psi, mean, g_mean) and takes(eta)):
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
    return s, var_hat, outlier, averaged


def average_gradient(g: Tensor, psi: Tensor, record: Tensor | None, outlier: Tensor | None, averaged: Tensor,
                     s: Tensor | None, var_hat: Tensor, average: str, momentum: bool, alpha: float,
                     eps: float) -> Tensor:
    used = g.clone()
    library().average_gradient(
        used.data_ptr(), psi.data_ptr(), _pointer(record), _pointer(outlier), averaged.data_ptr(),
        _pointer(s), var_hat.data_ptr(), len(g), 1 if record is None else len(record), _AVERAGES[average],
        momentum, alpha, eps)
    return used


def step_forward(x: Tensor, weight: Tensor, bias: Tensor, running_var: Tensor, record: Tensor | None,
                 num_outliers: Tensor | None, num_batches_tracked: Tensor, average: str, per_channel: bool,
                 unsettled: int, alpha: float, eps: float, needs_s: bool) -> tuple[Tensor | None, ...]:
    y, measured = torch.empty_like(x), x.new_empty(1, x.shape[-1])
    var_hat, rstd = torch.empty_like(running_var), torch.empty_like(running_var)
    s = torch.empty_like(running_var) if needs_s else None
    averaged = x.new_empty((), dtype=torch.bool)
    outlier = None if num_outliers is None else torch.empty_like(averaged)
    library().step_forward(
        x.data_ptr(), weight.data_ptr(), bias.data_ptr(), *_tokens(x), eps, running_var.data_ptr(),
        _pointer(record), _pointer(num_outliers), num_batches_tracked.data_ptr(),
        1 if record is None else len(record), _AVERAGES[average], per_channel, unsettled, alpha,
        measured.data_ptr(), _pointer(s), var_hat.data_ptr(), _pointer(outlier), averaged.data_ptr(),
        rstd.data_ptr(), y.data_ptr())
    return y, rstd, measured, s, var_hat, outlier, averaged


def step_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, psi: Tensor, record: Tensor | None,
                  outlier: Tensor | None, averaged: Tensor, s: Tensor | None, var_hat: Tensor, average: str,
                  momentum: bool, alpha: float, eps: float,
                  needs_dx: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    dx = torch.empty_like(x) if needs_dx else None
    dweight, dbias = torch.empty_like(rstd), torch.empty_like(rstd)
    library().step_backward(
        dy.data_ptr(), x.data_ptr(), weight.data_ptr(), rstd.data_ptr(), *_tokens(x), eps, psi.data_ptr(),
        _pointer(record), _pointer(outlier), averaged.data_ptr(), _pointer(s), var_hat.data_ptr(),
        1 if record is None else len(record), _AVERAGES[average], momentum, alpha, dweight.data_ptr(),
        dbias.data_ptr(), _pointer(dx))
    return dx, dweight, dbias


def _tokens(x: Tensor) -> tuple[int, int, int]:
    channels = x.shape[-1]
    return x.numel() // channels, channels, torch.get_num_threads()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
