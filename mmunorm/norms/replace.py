"""Norms for a model that is no config: `replace_norms` puts them where its LayerNorms are."""
from __future__ import annotations

import torch
from mmengine.registry import MODELS
from torch import nn

from ..compat import forget_compiled_code
from .base import check_norm_cfg
from .layers import is_channels_first


def replace_norms(model: nn.Module, norm_cfg: dict) -> nn.Module:
    """Replaces every LayerNorm of a model, in place; for models of timm, torchvision and the like.

    Scale and shift of each LayerNorm are kept where the new norm has `weight` and `bias`, and so are
    device, dtype, training mode and `requires_grad`.

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
    old = {name: norm for name, norm in model.named_modules(remove_duplicate=False)
           if isinstance(norm, nn.LayerNorm)}
    if not old:
        raise ValueError(f'model: {type(model).__name__} has no LayerNorm to replace')
    for name, norm in old.items():
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
    # One new norm for each old one, also where that is used under several names.
    new = {norm: _build(norm_cfg, norm, model) for norm in old.values()}
    forget_compiled_code()
    if '' in old:
        return new[model]
    for name, norm in old.items():
        parent, _, child = name.rpartition('.')
        setattr(model.get_submodule(parent), child, new[norm])
    return model


@torch.no_grad()
def _build(norm_cfg: dict, old: nn.LayerNorm, model: nn.Module) -> nn.Module:
    cfg = dict(norm_cfg)
    requires_grad = cfg.pop('requires_grad', True)
    new = MODELS.build(dict(cfg, num_features=old.normalized_shape[0]))
    # A LayerNorm without scale and shift has no device or dtype of its own: then the model's.
    like = next((p for p in (*old.parameters(), *model.parameters()) if p.is_floating_point()), None)
    if like is not None:
        new.to(like)
    for name in ('weight', 'bias'):
        value, parameter = getattr(old, name, None), getattr(new, name, None)
        if value is not None and parameter is not None:
            parameter.copy_(value).requires_grad_(requires_grad and value.requires_grad)
    return new.train(old.training)
