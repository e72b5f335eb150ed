"""Triton kernels for the training steps of UN on a GPU.

A layer has three launches forward and three backward: a pass over tokens that sums, UN's averages over steps, which
also add up the partial sums of that pass, and a pass that maps every token.

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

from ..step import Step
from .reference import num_tokens

# Elements of a tile, and how many programs a reduction is spread over.
_TILE = 4096
_PROGRAMS = 512


def new_step(norm, x: Tensor) -> Step:
    """A training step of UN on tokens `x`, without its output (:func:`affine`); updates the state of `norm`."""
    parts, weight, t = _partial_sums(x, None), norm.weight, norm.num_batches_tracked
    rstd, scale, s = torch.empty(3, len(weight), dtype=torch.float32, device=weight.device)
    outlier = torch.empty_like(t, dtype=torch.bool) if norm.outlier_filter else None
    averaged = torch.empty_like(t, dtype=torch.bool)
    with _on(x):
        _average_activation[(1, )](
            parts, weight, t, norm.running_var, norm.activation_record, norm.num_outliers, rstd, scale, s,
            _bytes(outlier), _bytes(averaged), len(parts), 1 / num_tokens(x), len(weight), norm.exact_steps, norm.alpha,
            norm.eps, WINDOW=norm.window, **_all_channels(weight))
    _mark_changed(t, norm.running_var, norm.activation_record, norm.num_outliers)
    return Step(rstd, averaged, outlier, measured=s, scale=scale)


def backward_statistics(norm, step: Step, dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dgamma, dbeta, and the `psi` that a step uses; updates the state of `norm`, which is without the loss scale."""
    parts, psi = _partial_sums(x, dy), norm.psi
    dweight, dbias, used = torch.empty(3, len(psi), dtype=torch.float32, device=psi.device)
    with _on(x):
        _average_gradient[(1, )](
            parts, step.rstd, weight, dweight, dbias, psi, norm.gradient_record, _bytes(step.outlier),
            _bytes(step.averaged), norm.loss_scale, used, len(parts), 1 / num_tokens(x), len(psi), norm.alpha,
            WINDOW=norm.window, **_all_channels(psi))
    _mark_changed(psi, norm.gradient_record)
    return dweight, dbias, used


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """As that of :mod:`.reference`."""
    return _map_tokens(x, scale, constant=shift)


def input_gradient(dy: Tensor, x: Tensor, direct: Tensor, psi: Tensor, rstd: Tensor, *_: None) -> Tensor:
    """As that of :mod:`.reference`, without its `constant` and `valid`."""
    return _map_tokens(x, psi, rstd=rstd, dy=dy, direct=direct)


def _map_tokens(x: Tensor, slope: Tensor, constant: Tensor | None = None, rstd: Tensor | None = None,
                dy: Tensor | None = None, direct: Tensor | None = None) -> Tensor:
    out = torch.empty_like(x)
    tokens, channels = num_tokens(x), x.shape[-1]
    blocks = _blocks(channels)
    grid = (triton.cdiv(tokens, blocks['BLOCK_T']), triton.cdiv(channels, blocks['BLOCK_C']))
    with _on(x):
        _map[grid](x, slope, constant, rstd, dy, direct, out, tokens, channels, **blocks)
    return out


def _partial_sums(x: Tensor, dy: Tensor | None) -> Tensor:
    """The sums of :func:`_products`, `(P, 2, C)` of P programs."""
    tokens, channels = num_tokens(x), x.shape[-1]
    blocks = _blocks(channels)
    columns = triton.cdiv(channels, blocks['BLOCK_C'])
    # Each program takes whole tiles.
    tiles = triton.cdiv(triton.cdiv(tokens, blocks['BLOCK_T']), triton.cdiv(_PROGRAMS, columns))
    rows = tiles * blocks['BLOCK_T']
    programs = triton.cdiv(tokens, rows)
    partial = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
    with _on(x):
        _products[programs, columns](x, dy, partial, tokens, rows, channels, **blocks)
    return partial


def _blocks(channels: int) -> dict[str, int]:
    block = min(128, triton.next_power_of_2(channels))
    return dict(BLOCK_C=block, BLOCK_T=_TILE // block, num_warps=8)


def _all_channels(values: Tensor) -> dict[str, int]:
    """One program has all channels, since the outlier test is over all of them."""
    block = triton.next_power_of_2(len(values))
    return dict(BLOCK_C=block, BLOCK_P=max(1, _TILE // block), num_warps=8)


def _bytes(flag: Tensor | None) -> Tensor | None:
    return None if flag is None else flag.view(torch.uint8)


def _on(x: Tensor):
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _mark_changed(*tensors: Tensor | None) -> None:
    """Tells autograd that a kernel wrote to these tensors."""
    for tensor in tensors:
        if tensor is not None:
            increment_version(tensor)


@triton.jit
def _products(x, dy, partial, tokens, rows, channels, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """`partial[p]` = sums of `dy * x` and of `dy`, over the tokens of one program; `dy` None is x."""
    first = tl.program_id(0) * rows
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    products = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for start in range(first, min(first + rows, tokens), BLOCK_T):
        t = start + tl.arange(0, BLOCK_T).to(tl.int64)
        inside = (t < tokens)[:, None] & (c < channels)[None, :]
        offset = t[:, None] * channels + c[None, :]
        value = tl.load(x + offset, inside, 0).to(tl.float32)
        gradient = value
        if dy is not None:
            gradient = tl.load(dy + offset, inside, 0).to(tl.float32)
        products += gradient * value
        total += gradient
    out = partial + tl.program_id(0) * 2 * channels + c
    tl.store(out, tl.sum(products, 0), c < channels)
    tl.store(out + channels, tl.sum(total, 0), c < channels)


@triton.jit
def _map(x, slope, constant, rstd, dy, direct, out, tokens, channels, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """`direct[c] * dy[t, c] - slope[c] * rstd[c]^2 * x[t, c]`; without `dy`, `slope[c] * x[t, c] + constant[c]`."""
    t = (tl.program_id(0) * BLOCK_T).to(tl.int64) + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (t < tokens)[:, None] & (c < channels)[None, :]
    offset = t[:, None] * channels + c[None, :]
    factor = tl.load(slope + c, c < channels, 0).to(tl.float32)
    value = tl.load(x + offset, inside, 0).to(tl.float32)
    if dy is None:
        result = value * factor[None, :] + tl.load(constant + c, c < channels, 0)[None, :].to(tl.float32)
    else:
        r = tl.load(rstd + c, c < channels, 0).to(tl.float32)
        gradient = tl.load(dy + offset, inside, 0).to(tl.float32)
        result = value * (-factor * r * r)[None, :]
        result += gradient * tl.load(direct + c, c < channels, 0)[None, :].to(tl.float32)
    tl.store(out + offset, result.to(out.dtype.element_ty), inside)


@triton.jit
def _sum_parts(parts, rows, c, channels, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """The sum of one of the two rows of all `(P, 2, C)` parts."""
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for first in range(0, rows, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        inside = (p < rows)[:, None] & (c < channels)[None, :]
        total += tl.load(parts + p[:, None] * 2 * channels + c[None, :], inside, 0)
    return tl.sum(total, 0)


@triton.jit
def _average_activation(parts, weight, step, running_var, record, outliers, rstd_out, scale_out, s_out, outlier_out,
                        averaged_out, rows, factor, channels, exact_steps, alpha, eps, WINDOW: tl.constexpr,
                        BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """`UN.average` of the sum of the parts times `factor`, which is stored in `s_out`."""
    c = tl.arange(0, BLOCK_C)
    inside = c < channels
    t = tl.load(step) + 1
    tl.store(step, t)
    settled = t > exact_steps
    running = tl.load(running_var + c, inside, 0)
    value = _sum_parts(parts, rows, c, channels, BLOCK_P, BLOCK_C) * factor
    tl.store(s_out + c, value, inside)
    s = tl.where(value - value == 0, value, running)  # inf and NaN are replaced
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
    tl.store(running_var + c, alpha * running + (1 - alpha) * var_hat, inside)


@triton.jit
def _average_gradient(parts, rstd, weight, dweight_out, dbias_out, psi, record, outlier, averaged, loss_scale, used_out,
                      rows, factor, channels, alpha, WINDOW: tl.constexpr, BLOCK_P: tl.constexpr,
                      BLOCK_C: tl.constexpr):
    """`UN.average_gradient` of dgamma, `rstd` times the sum of the parts, times `weight * factor`."""
    c = tl.arange(0, BLOCK_C)
    inside = c < channels
    old = tl.load(psi + c, inside, 0)
    dweight = _sum_parts(parts, rows, c, channels, BLOCK_P, BLOCK_C) * tl.load(rstd + c, inside, 0)
    tl.store(dweight_out + c, dweight, inside)
    tl.store(dbias_out + c, _sum_parts(parts + channels, rows, c, channels, BLOCK_P, BLOCK_C), inside)
    value = dweight * tl.load(weight + c, inside, 0).to(tl.float32) * factor
    if loss_scale is not None:  # the state is in units of the unscaled loss
        value /= tl.load(loss_scale).to(tl.float32)
    is_finite = value - value == 0
    finite = tl.min(is_finite.to(tl.int32), 0) > 0
    exact = tl.where(is_finite, value, old)
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
    newest = alpha * old + (1 - alpha) * tl.where(settled, mean, exact)
    tl.store(psi + c, tl.where(changes, newest, old), inside)
    used = tl.where(settled, newest, exact)
    if loss_scale is not None:
        used *= tl.load(loss_scale).to(tl.float32)
    tl.store(used_out + c, used, inside)
