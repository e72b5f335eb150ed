"""Where the norms and factors of residual schemes go when a model is folded."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from ..fusion.rules import After, Fact, Factor, Into, Station, Stays, fold_rule
from .connect import ResidualLayer
from .sublayer import Entrance, describe


@fold_rule(Entrance)
def entrance(module: Entrance) -> Iterator[Fact]:
    yield Into('norm', 'linear')


def residual_layer(layer: ResidualLayer) -> Iterator[Fact]:
    """The rule of a layer with residual schemes: the norms of its connections, and their factors."""
    for name, part, norm in layer.sublayers():
        residual, own = getattr(layer, name), f'{name}.norm'
        sublayer = describe(getattr(layer, part))
        last = _path(layer, sublayer.last) if sublayer.is_plain_after_last else ''
        between = (norm, own) if residual.norm_at == 'mid' else (own, )
        if residual.norm_at == 'pre':
            yield Into(norm, part)
        for each in between:
            yield After(each, last) if last else Stays(each, 'its input is scaled in between')
        if last and residual.norm_at != 'post' and residual.scales()[1] is not None:
            yield Factor(name, last, between)
        yield Stays(f'{name}.mix_norm', 'its output is mixed into the streams of all later layers')  # DLCL's


def stations_of(layers: Sequence[ResidualLayer], name: str) -> tuple[Station, ...]:
    """The stations of layers `name.0`, `name.1`, ...; none where their norms stand elsewhere than in the stream."""
    stations = []
    for i, layer in enumerate(layers):
        for residual, part, norm in layer.sublayers():
            sublayer = describe(getattr(layer, part))
            if getattr(layer, residual).norm_at != 'post' or not sublayer.is_plain_after_last:
                return ()
            stations.append(Station(residual, part, _path(layer, sublayer.last), norm).within(f'{name}.{i}'))
    return tuple(stations)


def _path(layer: nn.Module, part: nn.Module) -> str:
    """The name of a part within a layer."""
    return next(name for name, module in layer.named_modules() if module is part)
