"""The offline norms in one framework, and their peers."""
from .base import Norm
from .dyt import DyT
from .mabn import MABN
from .no_norm import NoNorm
from .offline import OfflineNorm
from .pn import PN
from .prep_bn import PRepBN
from .rep_bn import RepBN
from .replace import replace_norms
from .rmsn import RMSN
from .sync import convert_sync, revert_sync
from .token_bn import TokenBN
from .un import UN, SyncUN, UN2d

__all__ = [
    'MABN', 'PN', 'RMSN', 'UN', 'DyT', 'NoNorm', 'Norm', 'OfflineNorm', 'PRepBN', 'RepBN', 'SyncUN',
    'TokenBN', 'UN2d', 'convert_sync', 'replace_norms', 'revert_sync'
]
