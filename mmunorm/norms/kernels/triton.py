"""Triton kernels for a GPU.

The passes of `reference`, each of which reads its input once; and the averages over steps of
:mod:`mmunorm.norms.un`, one launch each, only for UN's own averages.

Input is contiguous and not empty, float16, bfloat16 or float32; sums are in float32. Reductions have two steps,
programs' partial sums and torch's sum of those, so that equal inputs have equal results bit by bit. Without a GPU,
`TRITON_INTERPRET=1` runs the kernels on a CPU, for tests.
"""
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from . import reference

variance_and_mean = reference.variance_and_mean

# Elements of a tile, and how many programs a reduction is spread over.
_TILE = 4096
_PROGRAMS = 1024


def square_sum(x: Tensor, valid: Tensor | None = None) -> Tensor:
    return _sum_products(x, None, None, valid)[-2]


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if torch.is_grad_enabled():  # the reference is differentiable
        return reference.affine(x, scale, shift)
    return _map_tokens(x, scale, shift, None, None, None)


def gradient_sums(dy: Tensor, x: Tensor, mean: Tensor | None = None,
                  valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = _sum_products(x, dy, mean, valid)
    return sums[0], sums[1], sums[-2], sums[-1]


def input_gradient(dy: Tensor, x: Tensor, direct: Tensor, slope: Tensor, constant: Tensor | None = None,
                   valid: Tensor | None = None) -> Tensor:
    return _map_tokens(x, slope, constant, dy, direct, valid)


def _blocks(channels: int) -> dict[str, int]:
    block = min(128, triton.next_power_of_2(channels))
    return dict(BLOCK_C=block, BLOCK_T=_TILE // block, num_warps=8)


def _bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.contiguous().view(torch.uint8)


def _on(x: Tensor):
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _map_tokens(x: Tensor, slope: Tensor, constant: Tensor | None, dy: Tensor | None, direct: Tensor | None,
                valid: Tensor | None) -> Tensor:
    out = torch.empty_like(x)
    tokens, channels = reference.num_tokens(x), x.shape[-1]
    blocks = _blocks(channels)
    grid = (triton.cdiv(tokens, blocks['BLOCK_T']), triton.cdiv(channels, blocks['BLOCK_C']))
    with _on(x):
        _map[grid](x, slope, constant, dy, direct, _bytes(valid), out, tokens, channels, **blocks)
    return out


def _sum_products(x: Tensor, dy: Tensor | None, mean: Tensor | None, valid: Tensor | None) -> Tensor:
    """The sums of :func:`_products` over tokens, `(2 or 4, C)`."""
    tokens, channels = reference.num_tokens(x), x.shape[-1]
    blocks = _blocks(channels)
    columns = triton.cdiv(channels, blocks['BLOCK_C'])
    # Each program takes whole tiles.
    tiles = triton.cdiv(triton.cdiv(tokens, blocks['BLOCK_T']), triton.cdiv(_PROGRAMS, columns))
    rows = tiles * blocks['BLOCK_T']
    programs = triton.cdiv(tokens, rows)
    partial = torch.empty(programs, 2 if valid is None else 4, channels, dtype=torch.float32, device=x.device)
    with _on(x):
        _products[programs, columns](x, dy, mean, _bytes(valid), partial, tokens, rows, channels, **blocks)
    return partial.sum(dim=0)


@triton.jit
def _products(x, dy, mean, valid, partial, tokens, rows, channels, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """`partial[p]` = sums of `dy * (x - mean)` and `dy`; with `valid` also over valid tokens only. `dy` None is x."""
    first = tl.program_id(0) * rows
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    center = tl.zeros((BLOCK_C, ), tl.float32)
    if mean is not None:
        center = tl.load(mean + c, c < channels, 0).to(tl.float32)
    products = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    valid_products = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    valid_total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for start in range(first, min(first + rows, tokens), BLOCK_T):
        t = start + tl.arange(0, BLOCK_T).to(tl.int64)
        inside = (t < tokens)[:, None] & (c < channels)[None, :]
        place = t[:, None] * channels + c[None, :]
        value = tl.load(x + place, inside, 0).to(tl.float32)
        gradient = value
        if dy is not None:
            gradient = tl.load(dy + place, inside, 0).to(tl.float32)
        product = gradient * (value - center[None, :])
        products += product
        total += gradient
        if valid is not None:
            counts = tl.load(valid + t, t < tokens, 0)[:, None] != 0
            valid_products += tl.where(counts, product, 0)
            valid_total += tl.where(counts, gradient, 0)
    if valid is None:
        out = partial + tl.program_id(0) * 2 * channels + c
    else:
        out = partial + tl.program_id(0) * 4 * channels + c
        tl.store(out + 2 * channels, tl.sum(valid_products, 0), c < channels)
        tl.store(out + 3 * channels, tl.sum(valid_total, 0), c < channels)
    tl.store(out, tl.sum(products, 0), c < channels)
    tl.store(out + channels, tl.sum(total, 0), c < channels)


@triton.jit
def _map(x, slope, constant, dy, direct, valid, out, tokens, channels, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """`direct[c] * dy[t, c] + valid[t] * (constant[c] - slope[c] * x[t, c])`; without `dy`, `slope * x + constant`."""
    t = (tl.program_id(0) * BLOCK_T).to(tl.int64) + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (t < tokens)[:, None] & (c < channels)[None, :]
    place = t[:, None] * channels + c[None, :]
    factor = tl.load(slope + c, c < channels, 0).to(tl.float32)
    if dy is not None:
        factor = -factor
    result = tl.load(x + place, inside, 0).to(tl.float32) * factor[None, :]
    if constant is not None:
        result += tl.load(constant + c, c < channels, 0)[None, :].to(tl.float32)
    if valid is not None:
        result = tl.where(tl.load(valid + t, t < tokens, 0)[:, None] != 0, result, 0)
    if dy is not None:
        gradient = tl.load(dy + place, inside, 0).to(tl.float32)
        result += gradient * tl.load(direct + c, c < channels, 0)[None, :].to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), inside)


def average_activation(total: Tensor, count: int | Tensor, t: Tensor, running_var: Tensor, record: Tensor,
                       num_outliers: Tensor | None, unsettled: int, alpha: float,
                       eps: float) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`OfflineNorm._average_activation` of the statistics `total / count`; it averages after `unsettled` steps.

    Returns `1 / sqrt(var_hat + eps)`, `averaged`, `outlier` and the statistics. Updates `t`, `running_var`, `record`,
    and `num_outliers`, None without the filter.
    """
    rstd, measured = torch.empty_like(total), torch.empty_like(total)
    outlier = None if num_outliers is None else torch.empty_like(num_outliers, dtype=torch.bool)
    averaged = torch.empty_like(t, dtype=torch.bool)
    with _on(total):
        _average_activation[(1, )](
            total, *_number(count), t, running_var, record, num_outliers, rstd, measured, _bytes(outlier),
            _bytes(averaged), len(total), unsettled, alpha, eps, WINDOW=len(record), **_all_channels(total))
    _mark_changed(t, running_var, record, num_outliers)
    return rstd, averaged, outlier, measured


def average_gradient(total: Tensor, count: int | Tensor, scale: Tensor, rstd: Tensor, psi: Tensor, record: Tensor,
                     outlier: Tensor | None, averaged: Tensor, alpha: float,
                     loss_scale: Tensor | int | None) -> Tensor:
    """`OfflineNorm._update_psi` of the statistics `scale * total / count`: the `psi * rstd^2` `(C,)` of `dx`.

    Updates `psi` and `record` `(M, C)`, which do not contain the loss scale.
    """
    slope = torch.empty_like(total)
    with _on(total):
        _average_gradient[(1, )](total, *_number(count), scale, rstd, psi, record, _bytes(outlier), _bytes(averaged),
                                 *_number(1 if loss_scale is None else loss_scale), slope, len(total), alpha,
                                 WINDOW=len(record), **_all_channels(total))
    _mark_changed(psi, record)
    return slope


def _number(value: int | Tensor) -> tuple[Tensor | None, float]:
    """A number as a kernel takes it: on the device, or as an argument."""
    return (value, 1.) if isinstance(value, Tensor) else (None, float(value))


def _mark_changed(*tensors: Tensor | None) -> None:
    """Tells autograd that a kernel wrote to these tensors."""
    for tensor in tensors:
        if tensor is not None:
            increment_version(tensor)


def _all_channels(values: Tensor) -> dict[str, int]:
    """One program has all channels, since the outlier test is over all of them."""
    block = triton.next_power_of_2(len(values))
    return dict(BLOCK_C=block, num_warps=min(16, max(1, block // 256)))


@triton.jit
def _moving_average(old, newest, alpha):
    return alpha * old + (1 - alpha) * newest


@triton.jit
def _is_finite(value):
    return value - value == 0


@triton.jit
def _average_activation(total, count, number, step, running_var, record, outliers, rstd_out, measured_out, outlier_out,
                        averaged_out, channels, unsettled, alpha, eps, WINDOW: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.arange(0, BLOCK_C)
    inside = c < channels
    t = tl.load(step) + 1
    tl.store(step, t)
    settled = t > unsettled
    running = tl.load(running_var + c, inside, 0)
    tokens = number
    if count is not None:
        tokens = tl.load(count).to(tl.float32)
    value = tl.load(total + c, inside, 0) / tokens
    tl.store(measured_out + c, value, inside)
    s = tl.where(_is_finite(value), value, running)
    found = settled & False
    if outliers is not None:  # V of Eq. 19, of the record as it is before this step
        roots = tl.zeros((BLOCK_C, ), tl.float32)
        for m in tl.static_range(WINDOW):
            roots += tl.sqrt(tl.load(record + m * channels + c, inside, 0))
        mean = tl.sum(roots, 0) / (WINDOW * channels)
        squares = tl.zeros((BLOCK_C, ), tl.float64)  # a sum of large statistics
        for m in tl.static_range(WINDOW):
            deviation = (tl.sqrt(tl.load(record + m * channels + c, inside, 0)) - mean).to(tl.float64)
            squares += tl.where(inside, deviation * deviation, 0)
        variance = tl.sum(squares, 0) / (WINDOW * channels - 1)  # NaN of one number, which finds no outlier
    am = s / WINDOW  # before the sum, which might overflow
    logs = tl.log(s.to(tl.float64))
    for m in tl.static_range(1, WINDOW):
        row = tl.load(record + m * channels + c, inside, 1)
        am += row / WINDOW
        logs += tl.log(row.to(tl.float64))
        tl.store(record + (m - 1) * channels + c, row, inside)
    gm = s
    if WINDOW > 1:
        gm = tl.exp(logs / WINDOW).to(tl.float32)
    if outliers is not None:  # Eq. 18. Rounding must not count as a difference between the means.
        exceeds = am * (1 - 16 * 1.1920929e-07) > gm + WINDOW * variance
        found = settled & (tl.max((exceeds & inside).to(tl.int32), 0) > 0)
        tl.store(outlier_out, found.to(tl.uint8))
        tl.store(outliers, tl.load(outliers) + found.to(tl.int64))
    tl.store(record + (WINDOW - 1) * channels + c, tl.where(found, running, s), inside)
    averaged = settled & (found == 0)
    tl.store(averaged_out, averaged.to(tl.uint8))
    var_hat = tl.where(averaged, gm, s)
    tl.store(rstd_out + c, 1 / tl.sqrt(var_hat + eps), inside)
    tl.store(running_var + c, _moving_average(running, var_hat, alpha), inside)


@triton.jit
def _average_gradient(total, count, number, scale, rstd, psi, record, outlier, averaged, loss_scale, factor, slope_out,
                      channels, alpha, WINDOW: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.arange(0, BLOCK_C)
    inside = c < channels
    old = tl.load(psi + c, inside, 0)
    tokens = number
    if count is not None:
        tokens = tl.load(count).to(tl.float32)
    units = factor
    if loss_scale is not None:
        units = tl.load(loss_scale).to(tl.float32)
    value = tl.load(scale + c, inside, 0) * tl.load(total + c, inside, 0) / tokens / units
    finite = tl.min(_is_finite(value).to(tl.int32), 0) > 0
    own = tl.where(_is_finite(value), value, old)
    target = own
    changes = finite
    if outlier is not None:
        is_outlier = tl.load(outlier) != 0
        target = tl.where(is_outlier, old, own)
        changes = finite & (is_outlier == 0)
    mean = target / WINDOW
    for m in tl.static_range(1, WINDOW):
        row = tl.load(record + m * channels + c, inside, 0)
        mean += row / WINDOW
        tl.store(record + (m - 1) * channels + c, row, inside & finite)
    tl.store(record + (WINDOW - 1) * channels + c, target, inside & finite)
    settled = tl.load(averaged) != 0
    newest = _moving_average(old, tl.where(settled, mean, own), alpha)
    tl.store(psi + c, tl.where(changes, newest, old), inside)
    r = tl.load(rstd + c, inside, 0)
    tl.store(slope_out + c, tl.where(settled, newest, own) * units * r * r, inside)
