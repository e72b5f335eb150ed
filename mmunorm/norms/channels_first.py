"""The offline norms for `(N, C, H, W)` maps; each keeps the state of its form for tokens."""
from __future__ import annotations

from mmengine.registry import MODELS
from torch import nn

from .mabn import MABN
from .rep_bn import RepBN
from .token_bn import TokenBN
from .un import UN, ChannelsFirst, SyncUN, UN2d


@MODELS.register_module()
class SyncUN2d(ChannelsFirst, SyncUN):
    """:class:`SyncUN` for `(N, C, H, W)` maps."""


@MODELS.register_module()
class MABN2d(ChannelsFirst, MABN):
    """:class:`MABN` for `(N, C, H, W)` maps."""


@MODELS.register_module()
class TokenBN2d(ChannelsFirst, TokenBN):
    """:class:`TokenBN` for `(N, C, H, W)` maps."""


@MODELS.register_module()
class RepBN2d(ChannelsFirst, RepBN):
    """:class:`RepBN` for `(N, C, H, W)` maps."""


_FOR_MAPS = {UN: UN2d, SyncUN: SyncUN2d, MABN: MABN2d, TokenBN: TokenBN2d, RepBN: RepBN2d}


def for_maps(norm: nn.Module) -> nn.Module:
    """Makes a norm over tokens one over the channels of `(N, C, H, W)`, in place.

    Raises:
        ValueError: there is no such form of it.
    """
    if isinstance(norm, ChannelsFirst):
        return norm
    if type(norm) not in _FOR_MAPS:
        names = ', '.join(cls.__name__ for cls in _FOR_MAPS)
        raise ValueError(f'norm_cfg: {type(norm).__name__} has no form for maps (N, C, H, W), which this model has '
                         f'norms over; take one of {names}')
    norm.__class__ = _FOR_MAPS[type(norm)]
    return norm

