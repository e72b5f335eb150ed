"""Triton kernels for a GPU.

The passes of `reference`, each of which reads its input once; and the averages over steps of
:mod:`mmunorm.norms.un`, one launch each, only for UN's own averages. Those also add up the partial sums of a pass, so
that a layer has three launches forward and three backward.

Input is contiguous and not empty, float16, bfloat16 or float32; sums are in float32. Reductions have two steps,
programs' partial sums and the sum of those, so that equal inputs have equal results bit by bit. Without a GPU,
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

# Elements of a tile, and how many programs a reduction is spread over.
_TILE = 4096
_PROGRAMS = 512


def second_moment(x: Tensor, valid: Tensor | None = None) -> Tensor:
    return _total(_partial_sums(x, None, None, None, valid), valid)[2]


def second_moment_parts(x: Tensor) -> Tensor:
    """`(P, C)`, whose sum over P is the second moment."""
    return _partial_sums(x, None, None, None, None)[:, 2]


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _map_tokens(x, scale, shift, None, None, None, None)


def gradient_sums(dy: Tensor, x: Tensor, rstd: Tensor, mean: Tensor | None = None,
                  valid: Tensor | None = None) -> tuple[Tensor, ...]:
    return _total(_partial_sums(x, dy, rstd, mean, valid), valid).unbind()


def gradient_parts(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """`(P, 2, C)`, whose sums over P are those of `dy * z` and `dy` over all tokens."""
    return _partial_sums(x, dy, rstd, None, None)[:, :2]


def input_gradient(dy: Tensor, x: Tensor, direct: Tensor, psi: Tensor, rstd: Tensor, constant: Tensor | None = None,
                   valid: Tensor | None = None) -> Tensor:
    return _map_tokens(x, psi, constant, rstd, dy, direct, valid)


def _blocks(channels: int) -> dict[str, int]:
    block = min(128, triton.next_power_of_2(channels))
    return dict(BLOCK_C=block, BLOCK_T=_TILE // block, num_warps=8)


def _bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.contiguous().view(torch.uint8)


def _on(x: Tensor):
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _map_tokens(x: Tensor, slope: Tensor, constant: Tensor | None, rstd: Tensor | None, dy: Tensor | None,
                direct: Tensor | None, valid: Tensor | None) -> Tensor:
    out = torch.empty_like(x)
    tokens, channels = reference.num_tokens(x), x.shape[-1]
    blocks = _blocks(channels)
    grid = (triton.cdiv(tokens, blocks['BLOCK_T']), triton.cdiv(channels, blocks['BLOCK_C']))
    with _on(x):
        _map[grid](x, slope, constant, rstd, dy, direct, _bytes(valid), out, tokens, channels, **blocks)
    return out


def _partial_sums(x: Tensor, dy: Tensor | None, rstd: Tensor | None, mean: Tensor | None,
                  valid: Tensor | None) -> Tensor:
    """The sums of :func:`_products`, `(P, 4, C)` of P programs."""
    tokens, channels = reference.num_tokens(x), x.shape[-1]
    blocks = _blocks(channels)
    columns = triton.cdiv(channels, blocks['BLOCK_C'])
    # Each program takes whole tiles.
    tiles = triton.cdiv(triton.cdiv(tokens, blocks['BLOCK_T']), triton.cdiv(_PROGRAMS, columns))
    rows = tiles * blocks['BLOCK_T']
    programs = triton.cdiv(tokens, rows)
    partial = torch.empty(programs, 4, channels, dtype=torch.float32, device=x.device)
    with _on(x):
        _products[programs, columns](x, dy, rstd, mean, _bytes(valid), partial, tokens, rows, channels,
                                     1 / tokens if valid is None else 1., **blocks)
    return partial


def _total(partial: Tensor, valid: Tensor | None) -> Tensor:
    """The sums of :func:`_products` over all tokens, and their means over the valid ones, `(4, C)`."""
    sums = partial.sum(dim=0)
    if valid is not None:
        sums[2:] /= valid.sum()
    return sums


@triton.jit
def _products(x, dy, rstd, mean, valid, partial, tokens, rows, channels, factor, BLOCK_T: tl.constexpr,
              BLOCK_C: tl.constexpr):
    """`partial[p]` = sums of `dy * (x - mean) * rstd` and `dy`; both over valid tokens, times `factor`.

    `dy` None is x, `rstd` None 1.
    """
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
        offset = t[:, None] * channels + c[None, :]
        value = tl.load(x + offset, inside, 0).to(tl.float32)
        gradient = value
        if dy is not None:
            gradient = tl.load(dy + offset, inside, 0).to(tl.float32)
        product = gradient * (value - center[None, :])
        products += product
        total += gradient
        if valid is not None:
            counts = tl.load(valid + t, t < tokens, 0)[:, None] != 0
            valid_products += tl.where(counts, product, 0)
            valid_total += tl.where(counts, gradient, 0)
    scale = tl.zeros((BLOCK_C, ), tl.float32) + 1
    if rstd is not None:
        scale = tl.load(rstd + c, c < channels, 0).to(tl.float32)
    row = tl.sum(products, 0) * scale
    row_total = tl.sum(total, 0)
    valid_row = row
    valid_row_total = row_total
    if valid is not None:
        valid_row = tl.sum(valid_products, 0) * scale
        valid_row_total = tl.sum(valid_total, 0)
    out = partial + tl.program_id(0) * 4 * channels + c
    tl.store(out, row, c < channels)
    tl.store(out + channels, row_total, c < channels)
    tl.store(out + 2 * channels, valid_row * factor, c < channels)
    tl.store(out + 3 * channels, valid_row_total * factor, c < channels)


@triton.jit
def _map(x, slope, constant, rstd, dy, direct, valid, out, tokens, channels, BLOCK_T: tl.constexpr,
         BLOCK_C: tl.constexpr):
    """`direct[c] * dy[t, c] + valid[t] * (constant[c] - slope[c] * rstd[c]^2 * x[t, c])`.

    Without `dy`, `slope * x + constant`.
    """
    t = (tl.program_id(0) * BLOCK_T).to(tl.int64) + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (t < tokens)[:, None] & (c < channels)[None, :]
    offset = t[:, None] * channels + c[None, :]
    factor = tl.load(slope + c, c < channels, 0).to(tl.float32)
    if dy is not None:
        r = tl.load(rstd + c, c < channels, 0).to(tl.float32)
        factor = -factor * r * r
    result = tl.load(x + offset, inside, 0).to(tl.float32) * factor[None, :]
    if constant is not None:
        result += tl.load(constant + c, c < channels, 0)[None, :].to(tl.float32)
    if valid is not None:
        result = tl.where(tl.load(valid + t, t < tokens, 0)[:, None] != 0, result, 0)
    if dy is not None:
        gradient = tl.load(dy + offset, inside, 0).to(tl.float32)
        result += gradient * tl.load(direct + c, c < channels, 0)[None, :].to(tl.float32)
    tl.store(out + offset, result.to(out.dtype.element_ty), inside)


def average_activation(statistic: Tensor, weight: Tensor, t: Tensor, running_var: Tensor, record: Tensor,
                       num_outliers: Tensor | None, exact_steps: int, alpha: float,
                       eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """`UN.average` of the statistic, `(C,)` or the `(P, C)` of :func:`second_moment_parts`, in one launch.

    It averages after `exact_steps` steps. Returns `1 / sqrt(var_hat + eps)`, `weight` times that, `averaged`, `outlier`
    and the statistic. Updates `t`, `running_var`, `record`, and `num_outliers`, None without the filter.
    """
    parts = statistic.unsqueeze(0) if statistic.dim() == 1 else statistic
    rstd, scale, s = torch.empty(3, len(weight), dtype=torch.float32, device=weight.device)
    outlier = None if num_outliers is None else torch.empty_like(num_outliers, dtype=torch.bool)
    averaged = torch.empty_like(t, dtype=torch.bool)
    with _on(statistic):
        _average_activation[(1, )](
            parts, weight, t, running_var, record, num_outliers, rstd, scale, s, _bytes(outlier), _bytes(averaged),
            len(parts), parts.stride(0), len(weight), exact_steps, alpha, eps, WINDOW=len(record),
            **_all_channels(weight))
    _mark_changed(t, running_var, record, num_outliers)
    return rstd, scale, averaged, outlier, s


def average_gradient(g: Tensor, psi: Tensor, record: Tensor, outlier: Tensor | None, averaged: Tensor, alpha: float,
                     loss_scale: Tensor | int | None, weight: Tensor | None = None,
                     tokens: int = 1) -> tuple[Tensor, Tensor | None]:
    """The `psi` that a step uses, of `UN.average_gradient`, in one launch.

    `g` is `(C,)`, or with `weight` the `(P, 2, C)` of :func:`gradient_parts` of so many tokens, whose sums `(2, C)` it
    also returns. Updates `psi` and `record` `(M, C)`, which do not contain the loss scale.
    """
    parts = g.unsqueeze(0) if weight is None else g
    used, sums = torch.empty_like(psi), None if weight is None else parts.new_empty(parts.shape[1:])
    scale, units = (loss_scale, 1.) if isinstance(loss_scale, Tensor) else (None, float(loss_scale or 1))
    with _on(parts):
        _average_gradient[(1, )](
            parts, weight, sums, psi, record, _bytes(outlier), _bytes(averaged), scale, units, used, len(parts),
            parts.stride(0), 1 / tokens, len(psi), alpha, WINDOW=len(record), **_all_channels(psi))
    _mark_changed(psi, record)
    return used, sums


def _mark_changed(*tensors: Tensor | None) -> None:
    """Tells autograd that a kernel wrote to these tensors."""
    for tensor in tensors:
        if tensor is not None:
            increment_version(tensor)


def _all_channels(values: Tensor) -> dict[str, int]:
    """One program has all channels, since the outlier test is over all of them."""
    block = triton.next_power_of_2(len(values))
    return dict(BLOCK_C=block, BLOCK_P=max(1, _TILE // block), num_warps=8)


@triton.jit
def _sum_parts(parts, rows, stride, c, inside, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """The sum of `rows` rows."""
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for first in range(0, rows, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        total += tl.load(parts + p[:, None] * stride + c[None, :], (p < rows)[:, None] & inside[None, :], 0)
    return tl.sum(total, 0)


@triton.jit
def _moving_average(old, newest, alpha):
    return alpha * old + (1 - alpha) * newest


@triton.jit
def _is_finite(value):
    return value - value == 0


@triton.jit
def _average_activation(parts, weight, step, running_var, record, outliers, rstd_out, scale_out, s_out, outlier_out,
                        averaged_out, rows, stride, channels, exact_steps, alpha, eps, WINDOW: tl.constexpr,
                        BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.arange(0, BLOCK_C)
    inside = c < channels
    t = tl.load(step) + 1
    tl.store(step, t)
    settled = t > exact_steps
    running = tl.load(running_var + c, inside, 0)
    value = _sum_parts(parts, rows, stride, c, inside, BLOCK_P, BLOCK_C)
    tl.store(s_out + c, value, inside)
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
    rstd = 1 / tl.sqrt(var_hat + eps)
    tl.store(rstd_out + c, rstd, inside)
    tl.store(scale_out + c, tl.load(weight + c, inside, 0).to(tl.float32) * rstd, inside)
    tl.store(running_var + c, _moving_average(running, var_hat, alpha), inside)


@triton.jit
def _average_gradient(parts, weight, sums, psi, record, outlier, averaged, loss_scale, units, used_out, rows, stride,
                      factor, channels, alpha, WINDOW: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """`g` is the sum of the parts; with `weight`, `weight * factor` times that, and `sums` are stored."""
    c = tl.arange(0, BLOCK_C)
    inside = c < channels
    old = tl.load(psi + c, inside, 0)
    if loss_scale is not None:
        units = tl.load(loss_scale).to(tl.float32)
    g = _sum_parts(parts, rows, stride, c, inside, BLOCK_P, BLOCK_C)
    if weight is not None:
        tl.store(sums + c, g, inside)
        total = _sum_parts(parts + channels, rows, stride, c, inside, BLOCK_P, BLOCK_C)
        tl.store(sums + channels + c, total, inside)
        g *= tl.load(weight + c, inside, 0).to(tl.float32) * factor
    value = g / units
    finite = tl.min(_is_finite(value).to(tl.int32), 0) > 0
    exact = tl.where(_is_finite(value), value, old)
    recorded = exact
    changes = finite
    if outlier is not None:
        is_outlier = tl.load(outlier) != 0
        recorded = tl.where(is_outlier, old, exact)
        changes = finite & (is_outlier == 0)
    mean = recorded / WINDOW
    for m in tl.static_range(1, WINDOW):
        row = tl.load(record + m * channels + c, inside, 0)
        mean += row / WINDOW
        tl.store(record + (m - 1) * channels + c, row, inside & finite)
    tl.store(record + (WINDOW - 1) * channels + c, recorded, inside & finite)
    settled = tl.load(averaged) != 0
    newest = _moving_average(old, tl.where(settled, mean, exact), alpha)
    tl.store(psi + c, tl.where(changes, newest, old), inside)
    tl.store(used_out + c, tl.where(settled, newest, exact) * units, inside)
