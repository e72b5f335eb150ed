"""Folding of norms that stand in the residual stream itself.

After a post-norm layer there is no linear layer that could take the norm up for all that reads the stream. So the
stream is written as `x = P u + c`, with a diagonal P and a vector c that are carried along it, and u is what the
folded model computes. A sublayer `x' = D (a x + b F(x)) + beta` with a norm of scale D and shift beta becomes

    u' = u + (b / a) P^-1 F(P u + c),    P' = a D P,    c' = a D c + beta:

P and c go into the first linear layer of F, `(b / a) P^-1` into its last, and the final P and c into what reads the
stream. P shrinks geometrically with the depth, so all of this is computed in float64.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..residuals import Residual, ResidualLayer
from ..residuals.sublayer import Entrance, describe
from .padding import Fill, largest_value
from .report import Site
from .rewrite import absorb, affine_of, exchange
from .rules import Behind, Fact, Into, Stays, Stream, fold_rule

Affine = tuple[Tensor, Tensor]


class Station(NamedTuple):
    """A sublayer of a stream, by full names: its connection, F, the last linear layer of that, and the norm."""
    residual: str
    part: str
    last: str
    norm: str


class FoldedResidual(Residual):
    """What is left of a connection whose factors are folded away: the sum, and norms that stay.

    Its buffer marks a folded checkpoint, as that of :class:`FoldedNorm` does.
    """

    def __init__(self, residual: Residual):
        nn.Module.__init__(self)
        self.norm_at = residual.norm_at
        self.norm = residual.norm
        self.drop = residual.drop
        # Before a norm it is folded away with that; ScaledResidual's stays.
        self.stream_scale = None if self.norm_at == 'post' else residual.scales()[0]
        self.register_buffer('folded', torch.tensor(True))

    def scales(self) -> tuple[float | None, None]:
        return self.stream_scale, None


def leave_residual(model: nn.Module, name: str) -> None:
    """Puts a :class:`FoldedResidual` where the connection `name` stands."""
    exchange(model, name, FoldedResidual(model.get_submodule(name)))


def fold_stream(model: nn.Module, stream: Stream) -> dict[str, Affine]:
    """Folds a stream except its norms, in place.

    Returns:
        The scale and shift that each of its norms and ends is to be folded with instead of its own, by name.
    """
    stations = stations_of(model.get_submodule(stream.layers), stream.layers)
    carried = _carry(model, stations)
    folded = {station.norm: affine for station, affine in zip(stations, carried[1:], strict=True)}
    p, c = carried[-1]
    for end in stream.ends:  # each channel of the stream once or several times in a row
        scale, shift = affine_of(model.get_submodule(end))
        copies = scale.numel() // p.numel()
        folded[end] = scale * p.repeat_interleave(copies), scale * c.repeat_interleave(copies) + shift
    for name, pad in stream.pads:
        pad(model.get_submodule(name), Fill(-c / p))
    for station, (p, _) in zip(stations, carried[:-1], strict=True):
        a, b = model.get_submodule(station.residual).scales()
        site = Site(station.last, after=True)
        absorb(model, site, factor(b, p) / (factor(a, p) * p), torch.zeros_like(p))
        leave_residual(model, station.residual)
    return folded


def _carry(model: nn.Module, stations: Sequence[Station]) -> list[Affine]:
    """P and c before the first sublayer and after each, `(C,)` float64."""
    affines: list[Affine] = []
    for station in stations:
        scale, shift = affine_of(model.get_submodule(station.norm))
        p, c = affines[-1] if affines else (torch.ones_like(scale), torch.zeros_like(shift))
        affines = affines or [(p, c)]
        scale = scale * factor(model.get_submodule(station.residual).scales()[0], scale)
        affines.append((scale * p, scale * c + shift))
    return affines


def range_obstacle(model: nn.Module, stations: Sequence[Station]) -> str:
    """Why P and c cannot be carried in the type of the weights, or ''."""
    for station, (p, c) in zip(stations, _carry(model, stations)[1:], strict=True):
        if (affine_of(model.get_submodule(station.norm))[0] == 0).any():
            return f'the scale of {station.norm} is 0 in some channel, where the stream cannot be told from it'
        dtype = model.get_submodule(station.last).weight.dtype
        limit, size = largest_value(dtype), p.abs()
        least, greatest, offset = size.min().item(), size.max().item(), (c.abs() / size).max().item()
        if not (1 / limit < least and max(greatest, offset) < limit):
            return (f'after {station.norm} the stream has scales of {least:.1e} to {greatest:.1e} and shifts '
                    f'up to {offset:.1e} times them, which leaves the range of {str(dtype).removeprefix("torch.")}')
    return ''


def factor(scale: float | Tensor | None, like: Tensor) -> Tensor:
    """a or b of a scheme as a tensor like `like`."""
    if scale is None:
        return torch.ones_like(like)
    scale = torch.as_tensor(scale, dtype=like.dtype, device=like.device)  # a float at its full precision
    return scale.detach().expand_as(like)


@fold_rule(Entrance)
def entrance(module: Entrance) -> Iterator[Fact]:
    yield Into('norm', 'linear')


def residual_layer(layer: ResidualLayer) -> Iterator[Fact]:
    """The fold rule of a layer with residual schemes: the norms of its connections."""
    for residual, part, norm in layer.sublayers():
        norm_at = getattr(layer, residual).norm_at
        own = f'{residual}.norm'
        sublayer = describe(getattr(layer, part))
        source = _path(layer, sublayer.last) if sublayer.is_plain_behind_last else ''
        if norm_at == 'pre':
            yield Into(norm, part)
        for each in (norm, own) if norm_at == 'mid' else (own, ):
            yield Behind(each, source) if source else Stays(each, 'its input is scaled in between')
        yield Stays(f'{residual}.mix_norm', 'its output is mixed into the streams of all later layers')  # DLCL's


def stations_of(layers: Sequence[ResidualLayer], name: str) -> list[Station]:
    """The stations of layers `name.0`, `name.1`, ...; none where their norms stand elsewhere than in the stream."""
    stations = []
    for i, layer in enumerate(layers):
        for residual, part, norm in layer.sublayers():
            sublayer = describe(getattr(layer, part))
            if getattr(layer, residual).norm_at != 'post' or not sublayer.is_plain_behind_last:
                return []
            paths = residual, part, _path(layer, sublayer.last), norm
            stations.append(Station(*(f'{name}.{i}.{path}' for path in paths)))
    return stations


def _path(layer: nn.Module, part: nn.Module) -> str:
    """The name of a part within a layer."""
    return next(name for name, module in layer.named_modules() if module is part)
