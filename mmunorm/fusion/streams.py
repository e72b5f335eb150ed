"""Folding of post-norm residual streams, whose norms are after the sums.

The output of a post-norm layer is consumed by a sum, so its norm cannot be folded into a linear layer alone. The
stream is therefore written as `x = P u + c`, with a diagonal P and a vector c that are carried along it; the folded
model computes u. A sublayer `x' = D (a x + b F(x)) + beta` with a norm of scale D and shift beta becomes

    u' = u + (b / a) P^-1 F(P u + c),    P' = a D P,    c' = a D c + beta:

P and c are folded into the first linear layer of F, `(b / a) P^-1` into its last, and the final P and c into the
consumers of the stream. P shrinks geometrically with depth, so all of this is computed in float64.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from .affine import Affine
from .padding import largest_value
from .plan import FoldPlan
from .report import Site
from .rewrite import absorb, exchange
from .rules import Stream


def fold_stream(model: nn.Module, plan: FoldPlan, stream: Stream) -> dict[str, Affine]:
    """Folds a stream, except its norms, in place.

    Returns:
        By name, the scale and shift to fold each of its norms and ends with, instead of its own.
    """
    carried = _carry(plan, stream)
    folded = {station.norm: affine for station, affine in zip(stream.stations, carried[1:], strict=True)}
    p, c = carried[-1]
    for end in stream.ends:  # which may repeat each channel of the stream several times in a row
        scale, shift = plan.affines[end]
        copies = scale.numel() // p.numel()
        folded[end] = scale * p.repeat_interleave(copies), scale * c.repeat_interleave(copies) + shift
    for station, (p, _) in zip(stream.stations, carried[:-1], strict=True):
        a, b = plan.modules[station.residual].scales()
        absorb(model, Site(station.last, after=True), factor(b, p) / (factor(a, p) * p), torch.zeros_like(p))
        leave_residual(model, station.residual)
    return folded


def leave_residual(model: nn.Module, name: str) -> None:
    """Replaces the connection `name` by one without factors."""
    exchange(model, name, model.get_submodule(name).without_factors())


def _carry(plan: FoldPlan, stream: Stream) -> list[Affine]:
    """P and c before the first sublayer and after each, `(C,)` float64."""
    affines: list[Affine] = []
    for station in stream.stations:
        scale, shift = plan.affines[station.norm]
        p, c = affines[-1] if affines else (torch.ones_like(scale), torch.zeros_like(shift))
        affines = affines or [(p, c)]
        scale = scale * factor(plan.modules[station.residual].scales()[0], scale)
        affines.append((scale * p, scale * c + shift))
    return affines


def range_obstacle(plan: FoldPlan, stream: Stream) -> str:
    """Why P and c cannot be carried in the dtype of the weights, or ''."""
    for station, (p, c) in zip(stream.stations, _carry(plan, stream)[1:], strict=True):
        if (plan.affines[station.norm][0] == 0).any():
            return f'the scale of {station.norm} is 0 in some channel, so its input cannot be recovered'
        dtype = plan.modules[station.last].weight.dtype
        limit, size = largest_value(dtype), p.abs()
        least, greatest, offset = size.min().item(), size.max().item(), (c.abs() / size).max().item()
        if not (1 / limit < least and max(greatest, offset) < limit):
            return (f'after {station.norm} the stream has scales of {least:.1e} to {greatest:.1e} and shifts '
                    f'up to {offset:.1e} times them, which exceeds the range of {str(dtype).removeprefix("torch.")}')
    return ''


def factor(scale: float | Tensor | None, like: Tensor) -> Tensor:
    """a or b of a scheme as a tensor like `like`."""
    if scale is None:
        return torch.ones_like(like)
    scale = torch.as_tensor(scale, dtype=like.dtype, device=like.device)  # a float at its full precision
    return scale.detach().expand_as(like)
