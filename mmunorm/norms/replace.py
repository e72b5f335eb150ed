"""Norms for a model that is no config: `replace_norms` puts them where its LayerNorms are."""
from __future__ import annotations

from collections.abc import Mapping

import torch
from mmengine.registry import MODELS
from torch import nn

from ..compat import forget_compiled_code
from .base import check_norm_cfg
from .layers import is_channels_first


def replace_norms(model: nn.Module, norm_cfg: dict) -> nn.Module:
    """Replaces every LayerNorm of a model, in place; for models of timm, torchvision and the like.

    Scale and shift of each LayerNorm are kept where the new norm has `weight` and `bias`, and so are
    device, dtype, training mode and `requires_grad`. This is the way to train from scratch, and no conversion of a
    trained model: an offline norm has no statistics yet, and needs another scale than LayerNorm.
    :func:`mmunorm.convert_norms` measures both.

    Args:
        model (nn.Module): with LayerNorms over the last dimension of `(..., C)`.
        norm_cfg (dict): config of the new norms, such as `dict(type='UN', window=4)`.

    Returns:
        `model`, or the new norm if `model` is itself a LayerNorm.

    Raises:
        TypeError: `norm_cfg` is not a dict with a `type`.
        KeyError: no norm of this type is registered.
        ValueError: `model` has no LayerNorm, or one that cannot be replaced: it is not over the last
            dimension alone, has an activation in it, or belongs to an `nn.TransformerEncoderLayer`. `model`
            is unchanged.
    """
    check_norm_cfg(norm_cfg)
    old = layer_norms(model)
    if not old:
        raise ValueError(f'model: {type(model).__name__} has no LayerNorm to replace')
    check_replaceable(model, old)
    # One new norm for each old one, also where that is used under several names.
    new = {norm: build_like(norm_cfg, norm, model) for norm in old.values()}
    if '' in old:
        return new[model]
    put(model, {name: new[norm] for name, norm in old.items()})
    return model


def layer_norms(model: nn.Module) -> dict[str, nn.LayerNorm]:
    """The LayerNorms of a model by full name, under all names that they have."""
    return {name: norm for name, norm in model.named_modules(remove_duplicate=False)
            if isinstance(norm, nn.LayerNorm)}


def check_replaceable(model: nn.Module, norms: Mapping[str, nn.LayerNorm]) -> None:
    """Raises a ValueError that names a LayerNorm of `model` whose place no norm over tokens can take."""
    for name, norm in norms.items():
        if len(norm.normalized_shape) != 1 or is_channels_first(norm):
            raise ValueError(f'model: {name} is a {type(norm).__name__} over {tuple(norm.normalized_shape)}; '
                             'only LayerNorms over the last dimension of (..., C) can be replaced')
        if list(norm.children()):
            parts = ', '.join(part for part, _ in norm.named_children())
            raise ValueError(f'model: {name} is a {type(norm).__name__}; its {parts} would be lost with it')
        parent = model.get_submodule(name.rpartition('.')[0])
        if isinstance(parent, nn.TransformerEncoderLayer):
            raise ValueError(f'model: {name} is in an nn.TransformerEncoderLayer, which in eval mode does '
                             'not call its norms: torch computes LayerNorm in their place')


def put(model: nn.Module, norms: Mapping[str, nn.Module]) -> None:
    """Puts modules into a model, in place, by full name."""
    for name, norm in norms.items():
        parent, _, child = name.rpartition('.')
        setattr(model.get_submodule(parent), child, norm)
    forget_compiled_code()


@torch.no_grad()
def build_like(norm_cfg: dict, old: nn.LayerNorm, model: nn.Module) -> nn.Module:
    """A norm of a config with scale, shift, device, dtype, mode and `requires_grad` of a LayerNorm of `model`."""
    cfg = dict(norm_cfg)
    requires_grad = cfg.pop('requires_grad', True)
    new = MODELS.build(dict(cfg, num_features=old.normalized_shape[0]))
    # A LayerNorm without scale and shift has no device or dtype of its own: then the model's.
    like = next((p for p in (*old.parameters(), *model.parameters()) if p.is_floating_point()), None)
    if like is not None:
        new.to(like)
    for name in ('weight', 'bias'):
        value = getattr(old, name, None)
        for parameter in (getattr(new, name, None), getattr(new, f'ln_{name}', None)):  # the second: of one that fades
            if value is not None and parameter is not None:
                parameter.copy_(value).requires_grad_(requires_grad and value.requires_grad)
    return new.train(old.training)
