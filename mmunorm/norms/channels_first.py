"""The offline norms for `(N, C, H, W)` maps, with the state of their forms for tokens."""
from __future__ import annotations

from torch import Tensor, nn

from ..registry import MODELS
from .mabn import MABN
from .rep_bn import RepBN
from .token_bn import TokenBN
from .un import UN, SyncUN


class ChannelsFirst:
    """Mixin that makes a norm over tokens one for `(N, C, H, W)` maps: every position is a token.

    `pad_mask` is `(N, H, W)`. The output has the shape and dtype of the input; its memory may be channels-last.
    """

    def forward(self, x: Tensor, pad_mask: Tensor | None = None, data_format: str = 'channel_first') -> Tensor:
        """Normalizes `x`; with 'channel_last', as in a call of mmpretrain's LN2d, it is `(N, H, W, C)`."""
        if x.dim() != 4:
            raise ValueError(f'{type(self).__name__}: x must be (N, C, H, W), got shape {tuple(x.shape)}')
        if data_format == 'channel_last':
            return super().forward(x, pad_mask)
        return super().forward(x.permute(0, 2, 3, 1), pad_mask).permute(0, 3, 1, 2)


@MODELS.register_module()
class UN2d(ChannelsFirst, UN):
    """:class:`UN` for `(N, C, H, W)` maps."""


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


def for_maps(norm: type[nn.Module]) -> type[nn.Module]:
    """The class that normalizes the channels of `(N, C, H, W)` as `norm` does tokens; a ValueError if there is none."""
    name = norm.__name__
    found = norm if name.endswith('2d') else MODELS.module_dict.get(f'{name}2d')
    if found is None:
        raise ValueError(f'norm_cfg: {name} does not support inputs (N, C, H, W), which this model '
                         'normalizes; use one of UN, SyncUN, MABN, TokenBN, RepBN')
    return found
