"""Which modules of a model are norms, and the layout of their inputs."""
from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

# torch's norms that compute statistics at inference; before 2.4 there is no RMSNorm.
ONLINE_NORMS = tuple(filter(None, (nn.LayerNorm, nn.GroupNorm, getattr(nn, 'RMSNorm', None))))
# timm's RmsNorm, torchvision's FrozenBatchNorm2d; not torch's parametrizations, such as _WeightNorm.
_NORM_NAME = re.compile(r'[^_].*Norm(?!al)')


def has_affine(module: nn.Module) -> bool:
    """Whether the class of a module has `affine()`; an instance may have a bool or a layer of this name."""
    return callable(getattr(type(module), 'affine', None))


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization layer: mmunorm's, torch's, or one by its `affine()` or its name.

    What fuse_norms leaves of a norm is none.
    """
    if isinstance(module, nn.Identity) or getattr(module, 'is_folded', False):
        return False
    return (isinstance(module, (_NormBase, *ONLINE_NORMS)) or has_affine(module)
            or hasattr(type(module), 'fold_obstacle')
            or bool(_NORM_NAME.match(type(module).__name__)) and not list(module.children()))


def norm_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields names and modules of all norms, in the order of the model, without those inside of another norm."""
    found = []
    for name, module in model.named_modules():
        if is_norm(module) and not any(name.startswith(f'{outer}.') for outer in found):
            found.append(name)
            yield name, module


def is_channels_first(norm: nn.Module) -> bool:
    """Whether a norm takes maps `(N, C, H, W)`, not tokens `(..., C)`; decided by its `data_format` or class."""
    data_format = getattr(norm, 'data_format', None)
    if data_format is not None:  # ConvNeXt's and HorNet's
        return data_format == 'channels_first'
    return isinstance(norm, (nn.GroupNorm, _NormBase)) or '2d' in type(norm).__name__.lower()


def channel_axis(norm: nn.Module, kwargs: dict) -> int:
    """The dimension of the channels in a call with these keyword arguments: mmpretrain's LN2d takes either format."""
    return 1 if is_channels_first(norm) and kwargs.get('data_format') != 'channel_last' else -1


def input_of(args: tuple, kwargs: dict) -> tuple[Tensor, Tensor | None]:
    """`x` and `pad_mask` of a norm's call, from the arguments of a forward hook with `with_kwargs=True`."""
    x = args[0] if args else next(iter(kwargs.values()))
    return x, kwargs.get('pad_mask', args[1] if len(args) > 1 else None)
