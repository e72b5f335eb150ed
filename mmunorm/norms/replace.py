"""`replace_norms`: another norm in place of each LayerNorm and RMSNorm of a model that was not built from a config."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..modules import disable_fast_path, is_any, refuse_save_pretrained, set_submodules
from ..registry import MODELS, registered
from ..utils import check_module
from .base import Norm, check_norm_cfg
from .channels_first import for_maps
from .layers import is_channels_first

# By name, so that timm and mmpretrain need not be installed, nor a torch that has RMSNorm.
_RMS_NORMS = ('torch.nn.modules.normalization.RMSNorm',
              *(f'timm.layers.norm.{name}' for name in ('RmsNorm', 'RmsNorm2d', 'RmsNormFp32', 'RmsNorm2dFp32')))
_LAYER_NORMS = ('torch.nn.modules.normalization.LayerNorm', 'mmpretrain.models.backbones.hornet.HorNetLayerNorm')
# The children of timm's norms with an activation, in the order in which they run.
_FUSED = ('drop', 'act')
NOT_SAVED = ('the model has norms of mmunorm, and from_pretrained would build LayerNorms with its weights. Use '
             'torch.save(model.state_dict(), path); to load it, call mmunorm.replace_norms(model, norm_cfg) before '
             'model.load_state_dict')


def replace_norms(model: nn.Module, norm_cfg: dict, names: Sequence[str] | None = None) -> nn.Module:
    """Replaces LayerNorms and RMSNorms of a model, in place; for models of timm, torchvision and the like.

    They may be torch's, timm's or mmpretrain's. Over the channels of `(N, C, H, W)` the new norm is its form for maps,
    such as UN2d; in place of a norm of timm with an activation, a `Sequential` of `norm`, `drop` and `act`. torch's
    fast path of `nn.TransformerEncoderLayer` is disabled. The new norm has the parameters `weight` and `bias` of the
    old one themselves, its device, dtype, training mode and `requires_grad`. Calls of `F.layer_norm` are not replaced.
    Use this to train from scratch; a trained model needs :func:`mmunorm.convert_norms`.

    Args:
        model (nn.Module): with such norms.
        norm_cfg (dict): config of the new norms, such as `dict(type='UN', window=4)`.
        names (Sequence[str], optional): full names of the norms to replace. Defaults to None: all.

    Returns:
        `model`, or the new norm if `model` is itself such a norm.

    Raises:
        TypeError: `model` is no module, or `norm_cfg` is not a dict with a `type` or has an unknown argument.
        KeyError: no norm of this type is registered.
        ValueError: `model` has no LayerNorm or RMSNorm, none of such a name, or one that cannot be replaced; `model` is
            unchanged.
    """
    check_module(model)
    check_norm_cfg(norm_cfg)
    old = layer_norms(model)
    if not old:
        raise ValueError(f'model: {type(model).__name__} has no LayerNorm or RMSNorm')
    if names is not None:
        if missing := [name for name in names if name not in old]:
            raise ValueError(f'names: {type(model).__name__} has no LayerNorm {missing[0]!r}')
        old = {name: old[name] for name in names}
    check_replaceable(old)
    # One new norm for each old one, also where that is used under several names.
    new = {norm: with_fused_parts(build_like(norm_cfg, norm, model), norm) for norm in old.values()}
    for norm, replacement in new.items():
        _share_parameters(norm, replacement.norm if isinstance(replacement, nn.Sequential) else replacement)
    if '' in old:
        return new[model]
    disable_fast_path(model, list(old))
    set_submodules(model, {name: new[norm] for name, norm in old.items()})
    refuse_save_pretrained(model, lambda part: isinstance(part, Norm), NOT_SAVED)
    return model


def _share_parameters(old: nn.Module, new: nn.Module) -> None:
    """Gives a norm the parameters of the old one themselves: another layer or an optimizer may have them, too."""
    for name in ('weight', 'bias'):
        value, built = getattr(old, name, None), getattr(new, name, None)
        if isinstance(value, nn.Parameter) and isinstance(built, nn.Parameter) and value.shape == built.shape:
            setattr(new, name, value.requires_grad_(built.requires_grad))


def layer_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The LayerNorms and RMSNorms of a model, or of a class derived from them, by each of their full names."""
    return {name: norm for name, norm in model.named_modules(remove_duplicate=False)
            if is_any(norm, _LAYER_NORMS + _RMS_NORMS) and not getattr(norm, 'is_folded', False)}


def is_rms(norm: nn.Module) -> bool:
    """Whether a norm divides by the root mean square and subtracts no mean."""
    return is_any(norm, _RMS_NORMS)


def is_layer_norm(norm: nn.Module) -> bool:
    """Whether a norm is a LayerNorm, or of a class derived from it."""
    return is_any(norm, _LAYER_NORMS)


def eps_of(norm: nn.Module, dtype: torch.dtype) -> float:
    """What a norm adds to the variance; for torch's RMSNorm it may depend on the dtype of its input."""
    return torch.finfo(dtype).eps if norm.eps is None else norm.eps


def check_replaceable(norms: Mapping[str, nn.Module]) -> None:
    """Raises a ValueError that names a norm which no offline norm can replace."""
    for name, norm in norms.items():
        what = f'model: {name} is a {type(norm).__name__}'
        if len(norm.normalized_shape) != 1:
            raise ValueError(f'{what} over {tuple(norm.normalized_shape)}; only norms over the channels of '
                             '(..., C) or (N, C, H, W) can be replaced')
        if others := [part for part, _ in norm.named_children() if part not in _FUSED]:
            raise ValueError(f'{what}; its {", ".join(others)} would be lost with it')


def with_fused_parts(new: nn.Module, old: nn.Module) -> nn.Module:
    """`new`, followed by the dropout and activation of a norm of timm: a `Sequential` of `norm`, `drop` and `act`."""
    parts = dict(old.named_children())
    if not parts:
        return new
    sequence = nn.Sequential(OrderedDict(norm=new, **parts))
    sequence.training = new.training  # each part keeps its mode: `new` may not update its statistics
    return sequence


@torch.no_grad()
def build_like(norm_cfg: dict, old: nn.Module, model: nn.Module) -> nn.Module:
    """Builds a norm from a config, with scale, shift, device, dtype, mode and `requires_grad` of a norm of `model`.

    A ValueError if the old norm is over maps `(N, C, H, W)`, and the new one has no form for these.
    """
    cfg = dict(norm_cfg)
    requires_grad = cfg.pop('requires_grad', True)
    if is_channels_first(old):
        cfg['type'] = for_maps(registered(cfg['type']))
    new = MODELS.build(dict(cfg, num_features=old.normalized_shape[0]))
    # A LayerNorm without scale and shift has no device or dtype: then the model's.
    reference = next((p for p in (*old.parameters(), *model.parameters()) if p.is_floating_point()), None)
    if reference is not None:
        new.to(reference)
    for name in ('weight', 'bias'):
        value, parameter = getattr(old, name, None), getattr(new, name, None)
        if value is not None and parameter is not None:
            parameter.copy_(value).requires_grad_(value.requires_grad)
    trainable = [parameter.requires_grad for parameter in old.parameters()]
    if not requires_grad or trainable and not any(trainable):
        new.requires_grad_(False)  # `eta`, too
    return new.train(old.training)
