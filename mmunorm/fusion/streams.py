"""Folding of norms that stand in the residual stream itself, and of the factors of residual schemes.

Behind a post-norm layer there is no linear layer that could take the norm up for all that reads the stream. So the
stream is written as `x = P u + c`, with a diagonal P and a vector c that are carried along it, and u is what the
folded model computes. A sublayer `x' = D (a x + b F(x)) + beta` with a norm of scale D and shift beta becomes

    u' = u + (b / a) P^-1 F(P u + c),    P' = a D P,    c' = a D c + beta:

P and c go into the first linear layer of F, `(b / a) P^-1` into its last, and the final P and c into what reads the
stream. P shrinks geometrically with the depth, so all of this is computed in float64.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import AdaptivePadding
from torch import Tensor, nn

from ..residuals import Residual, ResidualLayer
from ..residuals.sublayer import describe
from .algebra import absorb_behind, affine_of, call_obstacle, source_obstacle
from .padding import Fill, largest_value
from .registry import Stream

Affine = tuple[Tensor, Tensor]


class FoldedResidual(Residual):
    """What is left of a connection whose factors are folded away: the sum, and norms that stay.

    Its buffer marks a folded checkpoint, as that of :class:`FoldedNorm` does.
    """

    def __init__(self, residual: Residual):
        nn.Module.__init__(self)
        self.norm_at = residual.norm_at
        self.norm = residual.norm
        self.drop = residual.drop
        # In front of a norm it is folded away with that; ScaledResidual's stays.
        self.stream_scale = None if self.norm_at == 'post' else residual.scales()[0]
        self.register_buffer('folded', torch.tensor(True))

    def scales(self) -> tuple[float | None, None]:
        return self.stream_scale, None


class FilledPadding(AdaptivePadding):
    """mmcv's padding of a map in front of patch merging, with a given token in place of zeros."""

    def set_fill(self, fill: Fill, like: Tensor) -> None:
        """Takes the token; `like` tells device and dtype."""
        self.register_buffer('pad_value', fill.value.to(like))

    def forward(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)`, filled up at the bottom and to the right."""
        height, width = x.shape[2:]
        below, right = self.get_pad_shape((height, width))
        if below == 0 and right == 0:
            return x
        x = F.pad(x, (0, right, 0, below))
        value = self.pad_value.view(-1, 1, 1)
        x[:, :, height:] = value
        x[:, :, :height, width:] = value
        return x


def pad_patch_merging(module: nn.Module, fill: Fill) -> None:
    """Makes patch merging pad with `fill`."""
    if module.adaptive_padding is not None:
        module.adaptive_padding.__class__ = FilledPadding
        module.adaptive_padding.set_fill(fill, module.reduction.weight)


def stream_obstacle(model: nn.Module, stream: Stream, others: Callable[[str, nn.Module], str]) -> str:
    """Why the layers of a stream, whose norms can be folded, cannot take up what it carries; or ''.

    `others` answers who else holds a module of a name, or its parameters.
    """
    for station in stream.stations:
        layer = model.get_submodule(station.last)
        if obstacle := source_obstacle(layer, affine_of(model.get_submodule(station.norm))[0].numel()):
            return f'{station.last} {obstacle}'
        if shared := others(station.last, layer):
            return f'{station.last} is shared with {shared}'
        if obstacle := call_obstacle(model.get_submodule(station.residual)):
            return f'{station.residual} {obstacle}'
    return _carry(model, stream)[1]


def fold_stream(model: nn.Module, stream: Stream) -> dict[str, Affine]:
    """Folds a stream but for its norms, in place.

    Returns:
        The scale and shift that each of its norms and ends is to be folded with in place of its own, by name.
    """
    carried, _ = _carry(model, stream)
    folded = {station.norm: affine for station, affine in zip(stream.stations, carried[1:], strict=True)}
    for end in stream.ends:
        folded[end] = _end_affine(model.get_submodule(end), carried[-1])
    for name, pad in stream.pads:
        p, c = carried[-1]
        pad(model.get_submodule(name), Fill(-c / p, -1, torch.zeros_like(p, dtype=torch.bool)))
    for station, (p, _) in zip(stream.stations, carried[:-1], strict=True):
        a, b = model.get_submodule(station.residual).scales()
        absorb_behind(model.get_submodule(station.last), _value(b, p) / (_value(a, p) * p), torch.zeros_like(p))
        leave(model, station.residual)
    return folded


def _carry(model: nn.Module, stream: Stream) -> tuple[list[Affine], str]:
    """P and c in front of the first sublayer and behind each, `(C,)` float64; and why they cannot be carried, or ''."""
    affines: list[Affine] = []
    for station in stream.stations:
        scale, shift = affine_of(model.get_submodule(station.norm))
        if not affines:
            affines.append((torch.ones_like(scale), torch.zeros_like(shift)))
        factor = scale * _value(model.get_submodule(station.residual).scales()[0], scale)
        p, c = affines[-1]
        affines.append((factor * p, factor * c + shift))
        if (scale == 0).any():
            return affines, f'the scale of {station.norm} is 0 in some channel, where the stream cannot be told from it'
        dtype = model.get_submodule(station.last).weight.dtype
        limit = largest_value(dtype)
        size = affines[-1][0].abs()
        least, greatest, offset = size.min().item(), size.max().item(), (affines[-1][1].abs() / size).max().item()
        if not (1 / limit < least and max(greatest, offset) < limit):
            return affines, (f'behind {station.norm} the stream has scales of {least:.1e} to {greatest:.1e} and shifts '
                             f'up to {offset:.1e} times them, which leaves the range of '
                             f'{str(dtype).removeprefix("torch.")}')
    return affines, ''


def _end_affine(norm: nn.Module, carried: Affine) -> Affine:
    """Scale and shift of a norm that reads `P u + c`, each channel of the stream once or several times in a row."""
    scale, shift = affine_of(norm)
    p, c = (value.repeat_interleave(scale.numel() // value.numel()) for value in carried)
    return scale * p, scale * c + shift


def leave(model: nn.Module, name: str) -> None:
    """Puts a :class:`FoldedResidual` where the connection `name` stands."""
    residual = model.get_submodule(name)
    device = next((tensor.device for tensor in model.parameters()), None)
    parent, _, child = name.rpartition('.')
    setattr(model.get_submodule(parent), child, FoldedResidual(residual).to(device).eval())


def fold_scales(model: nn.Module, others: Callable[[str, nn.Module], str]) -> None:
    """Takes b, such as LayerScale's weights, into the last layer of F, in place, wherever the sum reads that layer.

    Where a norm stands behind the sum it has stayed, and so does b. `others` as in :func:`stream_obstacle`.
    """
    names = {id(module): name for name, module in model.named_modules()}
    # All of them first: ReZero's connections share theirs.
    layers = [module for module in model.modules() if isinstance(module, ResidualLayer)]
    parts = [[getattr(layer, name) for name in names] for layer in layers for names in layer.sublayers()]
    found = [(residual, describe(part), norm, residual.scales()[1]) for residual, part, norm in parts]
    for residual, sublayer, norm, b in found:
        last, name = sublayer.last, names[id(residual)]
        between = [residual.norm, *([norm] if residual.norm_at == 'mid' else [])]
        is_plain = sublayer.is_plain_behind_last and all(isinstance(module, nn.Identity) for module in between)
        channels = sublayer.last.out_features
        if b is None or residual.norm_at == 'post' or not is_plain or source_obstacle(last, channels) or others(
                names[id(last)], last) or call_obstacle(residual):
            continue
        like = torch.ones(channels, dtype=torch.float64, device=last.weight.device)
        absorb_behind(last, _value(b, like), torch.zeros_like(like))
        leave(model, name)


def _value(scale: float | Tensor | None, like: Tensor) -> Tensor:
    """a or b of a scheme as a tensor like `like`."""
    if scale is None:
        return torch.ones_like(like)
    scale = torch.as_tensor(scale, dtype=like.dtype, device=like.device)  # a float at its full precision
    return scale.detach().expand_as(like)
