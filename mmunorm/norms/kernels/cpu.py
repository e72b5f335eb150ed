"""The reference's functions on a CPU with fewer passes over memory and no large temporaries.

torch's eager operators have no fused `sum(dy * x)`, but LayerNorm's backward kernel computes just that and
`sum(dy)` in one pass over `dy` and `x`. BatchNorm's is slower, but knows a mean for each channel, and adds in
float32 where LayerNorm's adds in the half precision of its input. Both add one token after the other, and
rounding grows with their number; so several tokens side by side are taken for channels of their own, in
blocks of tokens, and these sums are added at the end.

Input is contiguous, float16, bfloat16, float32 or float64. With `valid` the reference is called.
"""
from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .reference import statistics_dtype

# At most so many channels of tokens side by side: sums stay in the nearest cache.
_WIDTH = 768
# Rows that are added one after the other.
_ROWS = 1024
# Of an elementwise pass in two steps: the result of the first is still in a core's cache for the second.
_CHUNK_BYTES = 1 << 20


def second_moment(x: Tensor, valid: Tensor | None = None) -> Tensor:
    if valid is not None or x.dim() == 1:
        return reference.second_moment(x, valid)
    return _product_sums(x, x, None, with_sum=False)[0] / x.shape[:-1].numel()


def variance_and_mean(x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if valid is not None or x.dim() == 1:
        return reference.variance_and_mean(x, valid)
    dtype = statistics_dtype(x.dtype)
    x = x.view(-1, x.shape[-1])
    mean = x.sum(dim=0, dtype=dtype) / len(x)
    squares = torch.zeros_like(mean)
    for part in x.split(_rows(x)):
        squares += (part - mean).square_().sum(dim=0)
    return squares / len(x), mean


def normalize_forward(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if x.dtype == scale.dtype or torch.is_grad_enabled():  # the reference is differentiable
        return reference.normalize_forward(x, scale, shift)
    y = torch.empty_like(x)
    parts = (tensor.view(-1, x.shape[-1]).split(_rows(x)) for tensor in (y, x))
    for y_part, x_part in zip(*parts, strict=True):
        y_part.copy_(torch.addcmul(shift, x_part, scale))
    return y


def normalize_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None = None,
                       valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if valid is not None or x.dim() == 1:
        return reference.normalize_backward(dy, x, weight, rstd, mean, valid)
    products, dbias = _product_sums(dy, x, mean)
    dweight = products * rstd
    share = weight / x.shape[:-1].numel()
    return dweight, dbias, dweight * share, None if mean is None else dbias * share


def normalize_input_gradient(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, psi: Tensor,
                             mean: Tensor | None = None, g_mean: Tensor | None = None,
                             eta: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    if valid is not None:
        return reference.normalize_input_gradient(dy, x, weight, rstd, psi, mean, g_mean, eta, valid)
    direct, slope, constant = reference.input_gradient_terms(weight, rstd, psi, mean, g_mean, eta)
    dx = torch.empty_like(x)
    parts = (tensor.view(-1, x.shape[-1]).split(_rows(x)) for tensor in (dx, x, dy))
    for dx_part, x_part, dy_part in zip(*parts, strict=True):
        out = dx_part if x.dtype == direct.dtype else None  # half precision is rounded once, at the end
        if constant is None:
            out = torch.mul(x_part, slope, out=out)
        else:
            out = torch.addcmul(constant, x_part, slope, out=out)
        out.addcmul_(dy_part, direct)
        if out is not dx_part:
            dx_part.copy_(out)
    return dx


def _rows(x: Tensor) -> int:
    return max(1, _CHUNK_BYTES // (x.shape[-1] * x.element_size()))


def _product_sums(dy: Tensor, x: Tensor, mean: Tensor | None,
                  with_sum: bool = True) -> tuple[Tensor, Tensor | None]:
    """`sum(dy * (x - mean))` and `sum(dy)` over tokens."""
    channels, dtype = x.shape[-1], statistics_dtype(x.dtype)
    tokens = x.numel() // channels
    side_by_side = max(1, _WIDTH // channels)
    while tokens % side_by_side:
        side_by_side -= 1
    width = side_by_side * channels
    one = x.new_ones(width, dtype=dtype)
    by_row = mean is None and x.dtype == dtype
    if not by_row:
        mean = torch.zeros_like(one) if mean is None else mean.repeat(side_by_side)
    products = total = None
    blocks = (tensor.view(-1, width).split(_ROWS) for tensor in (dy, x))
    for dy_block, x_block in zip(*blocks, strict=True):
        if by_row:
            # Of rows with mean 0 and deviation 1.
            rows = x.new_zeros(2, len(x_block), 1, dtype=dtype)
            _, p, s = torch.ops.aten.native_layer_norm_backward(
                dy_block, x_block, [width], rows[0], rows[1].fill_(1), one, one, [False, True, with_sum])
        else:
            _, p, s = torch.ops.aten.native_batch_norm_backward(
                dy_block, x_block, one, None, None, mean, one, True, 0.0, [False, True, with_sum])
        products = p if products is None else products.add_(p)
        if with_sum:
            total = s if total is None else total.add_(s)
    if side_by_side > 1:
        products = products.view(side_by_side, channels).sum(0)
        total = total.view(side_by_side, channels).sum(0) if with_sum else None
    return products, total
