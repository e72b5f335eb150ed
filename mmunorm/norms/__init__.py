"""Offline norms, and the norms they are compared with."""
from ..registry import MODELS
from .base import Norm
from .channels_first import ChannelsFirst, MABN2d, RepBN2d, SyncUN2d, TokenBN2d, UN2d
from .dyt import Derf, DyT
from .mabn import MABN
from .no_norm import NoNorm
from .pn import PN
from .rep_bn import RepBN
from .replace import replace_norms
from .rmsn import RMSN
from .sync import convert_sync, revert_sync
from .token_bn import TokenBN
from .un import UN, OfflineNorm, SyncUN

# The types of norms over tokens, as `norm_cfg` and `--norm` name them.
TOKEN_NORMS = tuple(name for name, cls in list(globals().items())
                    if MODELS.module_dict.get(name) is cls and not issubclass(cls, ChannelsFirst))

__all__ = [
    'MABN', 'PN', 'RMSN', 'UN', 'Derf', 'DyT', 'MABN2d', 'NoNorm', 'Norm', 'OfflineNorm', 'RepBN', 'RepBN2d',
    'SyncUN', 'SyncUN2d', 'TokenBN', 'TokenBN2d', 'UN2d', 'convert_sync', 'replace_norms', 'revert_sync'
]
