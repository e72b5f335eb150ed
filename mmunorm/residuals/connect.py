"""Puts the connections of a scheme into the layers of a model, and starts their weights."""
from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import ClassVar

import torch
from mmengine.model import PretrainedInit
from torch import nn

from ..norms import NoNorm
from .base import RESIDUALS, Place, Residual, ResidualError
from .clock import UpdateClock
from .sublayer import describe

DEFAULT_RESIDUAL_CFG = dict(type='PreNorm')


class ResidualLayer(nn.Module):
    """A layer of two sublayers, `attn` and `ffn`, whose connections are `residual1` and `residual2`.

    :func:`connect` mixes it into a stock layer: names in the `state_dict` stay.
    """
    norm_names: ClassVar[tuple[str, str]]

    def norms(self) -> tuple[nn.Module, nn.Module]:
        """The norm of each sublayer."""
        first, second = self.norm_names
        return getattr(self, first), getattr(self, second)


def scheme_of(residual_cfg: dict) -> type[Residual]:
    """The class that a `residual_cfg` names.

    Raises:
        ResidualError: it is not a dict with a `type`, or there is no such scheme.
    """
    if not isinstance(residual_cfg, dict) or 'type' not in residual_cfg:
        raise ResidualError(f'residual_cfg={residual_cfg!r}: must be a dict that names its type, such as '
                            "dict(type='BranchNorm')")
    name = residual_cfg['type']
    cls = name if isinstance(name, type) and issubclass(name, Residual) else RESIDUALS.module_dict.get(name)
    if cls is None:
        raise ResidualError(f'residual_cfg: there is no residual scheme {name!r}; there are '
                            f'{", ".join(sorted(RESIDUALS.module_dict))}')
    return cls


def norm_of(residual_cfg: dict, norm_cfg: dict, default: dict) -> dict:
    """The `norm_cfg` of a model: none for a scheme without norms, where nobody asks for another.

    Args:
        residual_cfg: of the model.
        norm_cfg: the model's argument, checked.
        default: the very dict that is its default.
    """
    return dict(type='NoNorm') if scheme_of(residual_cfg).without_norm and norm_cfg is default else norm_cfg


def connect(model: nn.Module, layers: Sequence[nn.Module], cls: type[ResidualLayer], residual_cfg: dict,
            norm_cfg: dict) -> None:
    """Makes each layer an instance of `cls`, a subclass of its class, with connections of a scheme, in place.

    Args:
        model: gets the clock of the scheme, if that counts updates.
        layers: all layers of the model's stream, from its input on; their number is the depth.
        cls: what the layers become.
        residual_cfg: names the scheme and its arguments.
        norm_cfg: for norms of the scheme's own.

    Raises:
        ResidualError: `residual_cfg` names no scheme, or an argument that the scheme does not know or that is out of
            its range; or the scheme does not go with the layers or their norms.
    """
    scheme = scheme_of(residual_cfg)
    # mmengine writes a `_scope_` into what a config inherits from another package.
    arguments = {key: value for key, value in residual_cfg.items() if key not in ('type', '_scope_')}
    known = [name for name in inspect.signature(scheme).parameters if name != 'place']
    if unknown := [name for name in arguments if name not in known]:
        raise ResidualError(f'residual_cfg: {scheme.__name__} has no argument {", ".join(unknown)}; it has '
                            f'{", ".join(known) or "none"}')
    if scheme.needs_clock:
        model.update_clock = UpdateClock()
    previous = None
    for number, layer in enumerate(layers, start=1):
        layer.__class__ = cls
        for name, part, norm in zip(('residual1', 'residual2'), ('attn', 'ffn'), layer.norms(), strict=True):
            if scheme.without_norm and not isinstance(norm, NoNorm):
                raise ResidualError(f'norm_cfg: {scheme.__name__} is a scheme without norms, and got '
                                    f"{type(norm).__name__}; leave norm_cfg out, or make it dict(type='NoNorm')")
            sublayer = describe(getattr(layer, part))
            place = Place(
                sublayer,
                channels=sublayer.last.out_features,
                norm_cfg=norm_cfg,
                layer=number,
                depth=len(layers),
                clock=getattr(model, 'update_clock', None),
                previous=previous)
            try:
                previous = scheme(place, **arguments)
            except ValueError as error:
                raise ResidualError(f'residual_cfg: {scheme.__name__}: {error}') from error
            setattr(layer, name, previous)
            if hasattr(sublayer.module, 'add_identity'):
                sublayer.module.add_identity = False


@torch.no_grad()
def initialize(model: nn.Module, layers: Sequence[ResidualLayer], embedding: nn.Module) -> None:
    """Starts the weights of a model's layers as their scheme has them, unless its `init_cfg` loads a checkpoint.

    Args:
        model: a module of mmengine's, with an `init_cfg`.
        layers: all its layers, after :func:`connect`.
        embedding: the linear layer or convolution that makes the stream.
    """
    cfgs = [model.init_cfg] if isinstance(model.init_cfg, dict) else model.init_cfg or []
    if any(cfg['type'] in ('Pretrained', PretrainedInit) for cfg in cfgs):
        return
    for layer in layers:
        connections = layer.residual1, layer.residual2
        for residual, part, norm in zip(connections, ('attn', 'ffn'), layer.norms(), strict=True):
            residual.initialize(describe(getattr(layer, part)), norm)
    layers[0].residual1.initialize_embedding(embedding)
