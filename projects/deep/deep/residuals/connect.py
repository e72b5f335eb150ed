"""Adds the connections of a scheme to the layers of a model, and initializes their weights."""
from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from mmengine.model import PretrainedInit
from torch import nn

from mmunorm.norms import NoNorm
from mmunorm.norms.base import DEFAULT_NORM_CFG, check_norm_cfg

from .base import RESIDUALS, Residual, ResidualError, StackPosition
from .clock import UpdateClock
from .sublayer import describe

DEFAULT_RESIDUAL_CFG = dict(type='PreNorm')


class ResidualLayer(nn.Module):
    """A layer of sublayers, by default `attn` and `ffn`, whose connections are `residual1`, `residual2`, ...

    :func:`connect` mixes it into a stock layer; names in the `state_dict` do not change.
    """
    part_names: ClassVar[tuple[str, ...]] = ('attn', 'ffn')
    norm_names: ClassVar[tuple[str, ...]]

    def sublayers(self) -> Iterator[tuple[str, str, str]]:
        """Yields the names of each sublayer's connection, of the sublayer, and of its norm."""
        for i, (part, norm) in enumerate(zip(self.part_names, self.norm_names, strict=True), start=1):
            yield f'residual{i}', part, norm


def scheme_of(residual_cfg: dict) -> type[Residual]:
    """The class of a `residual_cfg`; a ResidualError if it is not a dict with the `type` of a scheme."""
    if not isinstance(residual_cfg, dict) or 'type' not in residual_cfg:
        raise ResidualError(f'residual_cfg={residual_cfg!r}: must be a dict that names its type, such as '
                            "dict(type='BranchNorm')")
    name = residual_cfg['type']
    cls = name if isinstance(name, type) and issubclass(name, Residual) else RESIDUALS.module_dict.get(name)
    if cls is None:
        raise ResidualError(f'residual_cfg: there is no residual scheme {name!r}; there are '
                            f'{", ".join(sorted(RESIDUALS.module_dict))}')
    return cls


def norm_of(residual_cfg: dict, norm_cfg: dict) -> dict:
    """The `norm_cfg` of a model: NoNorm for a scheme without norms, if the model's argument is the default object."""
    check_norm_cfg(norm_cfg)
    return dict(type='NoNorm') if scheme_of(residual_cfg).without_norm and norm_cfg is DEFAULT_NORM_CFG else norm_cfg


def connect(model: nn.Module, layers: Sequence[nn.Module], cls: type[ResidualLayer], residual_cfg: dict,
            norm_cfg: dict, stacks: tuple[int, int] | None = None, in_decoder: bool = False) -> None:
    """Makes each layer an instance of `cls`, a subclass of its class, with connections of a scheme, in place.

    Args:
        model: gets the clock of the scheme, if that counts updates.
        layers: all layers of a stream of the model, in order; their number is the depth.
        cls: the new class of the layers.
        residual_cfg: the scheme and its arguments.
        norm_cfg: for additional norms of the scheme.
        stacks: of an encoder-decoder the layers of both stacks, each of which is connected in its own call.
        in_decoder: whether `layers` are the decoder.

    Raises:
        ResidualError: `residual_cfg` is invalid, or the scheme does not fit the layers or their norms.
    """
    scheme = scheme_of(residual_cfg)
    # mmengine adds a `_scope_` to what a config inherits from another package.
    arguments = {key: value for key, value in residual_cfg.items() if key not in ('type', '_scope_')}
    known = [name for name in inspect.signature(scheme).parameters if name != 'position']
    if unknown := [name for name in arguments if name not in known]:
        raise ResidualError(f'residual_cfg: {scheme.__name__} has no argument {", ".join(unknown)}; it has '
                            f'{", ".join(known) or "none"}')
    if scheme.needs_clock and not hasattr(model, 'update_clock'):
        model.update_clock = UpdateClock()
    previous = None
    for number, layer in enumerate(layers, start=1):
        layer.__class__ = cls
        for name, part, norm_name in layer.sublayers():
            norm = getattr(layer, norm_name)
            if scheme.without_norm and not isinstance(norm, NoNorm):
                raise ResidualError(f'norm_cfg: {scheme.__name__} is a scheme without norms, and got '
                                    f"{type(norm).__name__}; leave norm_cfg out, or make it dict(type='NoNorm')")
            sublayer = describe(getattr(layer, part))
            position = StackPosition(
                sublayer,
                channels=sublayer.last.out_features,
                norm_cfg=norm_cfg,
                layer=number,
                depth=len(layers),
                stacks=stacks,
                in_decoder=in_decoder,
                is_first=part == layer.part_names[0],
                is_last=part == layer.part_names[-1],
                clock=getattr(model, 'update_clock', None),
                previous=previous)
            try:
                previous = scheme(position, **arguments)
            except ValueError as error:
                raise ResidualError(f'residual_cfg: {scheme.__name__}: {error}') from error
            setattr(layer, name, previous)
            if hasattr(sublayer.module, 'add_identity'):
                sublayer.module.add_identity = False


@torch.no_grad()
def initialize(model: nn.Module, layers: Sequence[ResidualLayer], embedding: nn.Module | None) -> None:
    """Initializes the layers of a model as their scheme requires, unless its `init_cfg` loads a checkpoint.

    `layers` are all its layers, after :func:`connect`, and `embedding` is the linear layer, convolution or embedding
    before the first one, or None if another stack has initialized it.
    """
    cfgs = [model.init_cfg] if isinstance(model.init_cfg, dict) else model.init_cfg or []
    if any(cfg['type'] in ('Pretrained', PretrainedInit) for cfg in cfgs):
        return
    for layer in layers:
        for residual, part, norm in layer.sublayers():
            getattr(layer, residual).initialize(describe(getattr(layer, part)), getattr(layer, norm))
    if embedding is not None:
        layers[0].residual1.initialize_embedding(embedding)
