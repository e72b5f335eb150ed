"""Norms for a model that is no config: `replace_norms` puts them where its LayerNorms and RMSNorms are."""
from __future__ import annotations

from collections.abc import Mapping

import torch
from mmengine.logging import print_log
from mmengine.registry import MODELS
from torch import nn

from ..compat import forget_compiled_code
from .base import check_norm_cfg
from .channels_first import for_maps
from .kinds import is_replaceable_kind, leave_fast_path, place_obstacle, with_fused_parts
from .layers import is_channels_first


def replace_norms(model: nn.Module, norm_cfg: dict) -> nn.Module:
    """Replaces every LayerNorm and RMSNorm of a model, in place; for models of timm, torchvision and the like.

    They may be torch's, timm's or mmpretrain's, over the last dimension of `(..., C)` or over the channels of
    `(N, C, H, W)`; there the new norm is the form for maps, such as UN2d. A norm of timm with an activation in it
    becomes a `Sequential` of `norm`, `drop` and `act`. An `nn.TransformerEncoderLayer` leaves torch's fast path, which
    does not call its norms; a line in the log says so.

    Scale and shift of each old norm are kept where the new norm has `weight` and `bias`, and so are
    device, dtype, training mode and `requires_grad`. This is the way to train from scratch, and no conversion of a
    trained model: an offline norm has no statistics yet, and needs another scale than LayerNorm.
    :func:`mmunorm.convert_norms` measures both.

    Args:
        model (nn.Module): with such norms.
        norm_cfg (dict): config of the new norms, such as `dict(type='UN', window=4)`.

    Returns:
        `model`, or the new norm if `model` is itself such a norm.

    Raises:
        TypeError: `norm_cfg` is not a dict with a `type`.
        KeyError: no norm of this type is registered.
        ValueError: `model` has no LayerNorm or RMSNorm, or one that cannot be replaced: it is over several dimensions,
            holds a module of unknown use, or is over maps, for which the new norm has no form. `model` is unchanged.
    """
    check_norm_cfg(norm_cfg)
    old = layer_norms(model)
    if not old:
        raise ValueError(f'model: {type(model).__name__} has no LayerNorm or RMSNorm to replace')
    check_replaceable(model, old)
    # One new norm for each old one, also where that is used under several names.
    new = {norm: with_fused_parts(build_like(norm_cfg, norm, model), norm) for norm in old.values()}
    if '' in old:
        return new[model]
    call_norms_of_encoder_layers(model, list(old))
    put(model, {name: new[norm] for name, norm in old.items()})
    return model


def layer_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The LayerNorms and RMSNorms of a model by full name, under all names that they have."""
    return {name: norm for name, norm in model.named_modules(remove_duplicate=False) if is_replaceable_kind(norm)}


def check_replaceable(model: nn.Module, norms: Mapping[str, nn.Module]) -> None:
    """Raises a ValueError that names a norm of `model` whose place no offline norm can take."""
    for name, norm in norms.items():
        if obstacle := place_obstacle(norm):
            raise ValueError(f'model: {name} {obstacle}')


def call_norms_of_encoder_layers(model: nn.Module, names: list[str]) -> list[tuple[nn.Module, str, object]]:
    """:func:`leave_fast_path`, with a line in the log where a layer has left it."""
    changes = leave_fast_path(model, names)
    if changes:
        layers = sum(isinstance(module, nn.TransformerEncoderLayer) for module, *_ in changes)
        print_log(f"torch's fast path is off for {layers} nn.TransformerEncoderLayer: in eval mode it would compute "
                  'LayerNorm in place of their norms', 'current')
    return changes


def put(model: nn.Module, norms: Mapping[str, nn.Module]) -> None:
    """Puts modules into a model, in place, by full name."""
    for name, norm in norms.items():
        parent, _, child = name.rpartition('.')
        setattr(model.get_submodule(parent), child, norm)
    forget_compiled_code()


@torch.no_grad()
def build_like(norm_cfg: dict, old: nn.Module, model: nn.Module) -> nn.Module:
    """A norm of a config with scale, shift, device, dtype, mode and `requires_grad` of an old norm of `model`.

    Raises:
        ValueError: the old norm is over maps `(N, C, H, W)`, and the new one has no form for these.
    """
    cfg = dict(norm_cfg)
    requires_grad = cfg.pop('requires_grad', True)
    new = MODELS.build(dict(cfg, num_features=old.normalized_shape[0]))
    if is_channels_first(old):
        new = for_maps(new)
    # A LayerNorm without scale and shift has no device or dtype of its own: then the model's.
    like = next((p for p in (*old.parameters(), *model.parameters()) if p.is_floating_point()), None)
    if like is not None:
        new.to(like)
    for name in ('weight', 'bias'):
        value = getattr(old, name, None)
        for parameter in (getattr(new, name, None), getattr(new, f'ln_{name}', None)):  # the second: PRepBN's
            if value is not None and parameter is not None:
                parameter.copy_(value).requires_grad_(requires_grad and value.requires_grad)
    return new.train(old.training)
