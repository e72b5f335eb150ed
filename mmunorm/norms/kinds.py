"""Which norms of other people's models an offline norm can take the place of, and how each of them is called."""
from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

# By name, so that nobody has to install what they do not use. RMSNorm of torch is younger than LayerNorm.
_RMS_NORMS = ('torch.nn.modules.normalization.RMSNorm',
              *(f'timm.layers.norm.{name}' for name in ('RmsNorm', 'RmsNorm2d', 'RmsNormFp32', 'RmsNorm2dFp32')))
_LAYER_NORMS = ('torch.nn.modules.normalization.LayerNorm', 'mmpretrain.models.backbones.hornet.HorNetLayerNorm')
# What timm's norms with an activation hold beside their own weights, in the order in which it runs.
_FUSED = ('drop', 'act')


def is_replaceable_kind(module: nn.Module) -> bool:
    """Whether a module is a LayerNorm or RMSNorm over channels, of torch, timm, mmpretrain or derived from those."""
    return _is_any(module, _LAYER_NORMS + _RMS_NORMS)


def is_rms(norm: nn.Module) -> bool:
    """Whether a norm divides by the root mean square and takes no mean off."""
    return _is_any(norm, _RMS_NORMS)


def _is_any(module: nn.Module, names: tuple[str, ...]) -> bool:
    return any(f'{cls.__module__}.{cls.__qualname__}' in names for cls in type(module).__mro__)


def eps_of(norm: nn.Module, dtype: torch.dtype) -> float:
    """What a norm adds to the variance; torch's RMSNorm may leave that to the dtype of its input."""
    return torch.finfo(dtype).eps if norm.eps is None else norm.eps


def fused_parts(norm: nn.Module) -> OrderedDict[str, nn.Module]:
    """What a norm of timm does behind the normalization, such as an activation; nothing for a plain norm."""
    return OrderedDict(norm.named_children())


def place_obstacle(norm: nn.Module) -> str:
    """Why no offline norm can take the place of `norm`, half a sentence, or ''."""
    if len(norm.normalized_shape) != 1:
        return (f'is a {type(norm).__name__} over {tuple(norm.normalized_shape)}; only norms over the channels of '
                '(..., C) or (N, C, H, W) can be replaced')
    if others := [name for name, _ in norm.named_children() if name not in _FUSED]:
        return f'is a {type(norm).__name__}; its {", ".join(others)} would be lost with it'
    return ''


def with_fused_parts(new: nn.Module, old: nn.Module) -> nn.Module:
    """`new` followed by what `old` does behind the normalization: a `Sequential` of `norm`, `drop` and `act`."""
    parts = fused_parts(old)
    if not parts:
        return new
    return nn.Sequential(OrderedDict(norm=new, **parts)).train(old.training)


def leave_fast_path(model: nn.Module, names: list[str]) -> list[tuple[nn.Module, str, object]]:
    """Lets the `nn.TransformerEncoderLayer`s that hold these norms call them in eval mode, too, in place.

    torch's fast path reads the weights of their norms and computes LayerNorm by itself. Only these layers leave it,
    and the `nn.TransformerEncoder`s around them.

    Returns:
        What was changed: module, attribute, and the value that it had.
    """
    layers = {model.get_submodule(name.rpartition('.')[0]) for name in names}
    layers = {layer for layer in layers if isinstance(layer, nn.TransformerEncoderLayer)}
    encoders = [module for module in model.modules()
                if isinstance(module, nn.TransformerEncoder) and not layers.isdisjoint(module.layers)]
    changes = [(module, name, getattr(module, name))
               for modules, name in ((layers, 'activation_relu_or_gelu'), (encoders, 'use_nested_tensor'))
               for module in modules if hasattr(module, name)]
    for module, name, value in changes:
        setattr(module, name, type(value)(0))
    return changes
