"""The offline norms in one framework, and their peers."""
from .base import Norm
from .dyt import DyT
from .mabn import MABN
from .no_norm import NoNorm
from .offline import OfflineNorm
from .pn import PN
from .replace import replace_norms
from .rmsn import RMSN
from .token_bn import PRepBN, RepBN, TokenBN
from .un import UN, UN2d

__all__ = [
    'MABN', 'PN', 'RMSN', 'UN', 'DyT', 'NoNorm', 'Norm', 'OfflineNorm', 'PRepBN', 'RepBN', 'TokenBN', 'UN2d',
    'replace_norms'
]
