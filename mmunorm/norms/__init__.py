"""The offline norms."""
from .base import OfflineNorm
from .un import UN, UN2d

__all__ = ['UN', 'OfflineNorm', 'UN2d']
