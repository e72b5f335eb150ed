"""Rules for folding the norms and factors of residual schemes."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from mmunorm.fusion.rules import Factor, Station

from .connect import ResidualLayer
from .sublayer import describe


def residual_layer(layer: ResidualLayer) -> Iterator[Factor]:
    """The rule of a layer with residual schemes: the factors of its connections."""
    for name, part, norm in layer.sublayers():
        residual, sublayer = getattr(layer, name), describe(getattr(layer, part))
        is_next = residual.norm_at != 'post' and sublayer.is_plain_after_last
        if is_next and residual.scales()[1] is not None:
            own = (f'{name}.norm', )
            yield Factor(name, _path(layer, sublayer.last), (norm, *own) if residual.norm_at == 'mid' else own)


def stations_of(layers: Sequence[ResidualLayer], name: str) -> tuple[Station, ...]:
    """The stations of layers `name.0`, `name.1`, ...; none if their norms are not in the stream."""
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
