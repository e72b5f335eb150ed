"""The norms of a model, and how their inputs are laid out."""
from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..fusion import is_norm


def norm_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of all norms, in the order of the model; not those that are part of another norm."""
    found = []
    for name, module in model.named_modules():
        if is_norm(module) and not any(name.startswith(f'{outer}.') for outer in found):
            found.append(name)
            yield name, module


def channel_axis(norm: nn.Module) -> int:
    """The dimension of a norm's input that counts channels: 1 for maps, -1 for tokens."""
    if isinstance(norm, (nn.GroupNorm, _NormBase)) or '2d' in type(norm).__name__.lower():
        return 1
    return -1


def num_channels(norm: nn.Module) -> int | None:
    """Channels of a norm; None where it has no such thing: a LayerNorm over several dimensions."""
    shape = getattr(norm, 'normalized_shape', None)
    if shape is not None:
        return shape[0] if len(shape) == 1 else None
    return getattr(norm, 'num_channels', getattr(norm, 'num_features', None))
