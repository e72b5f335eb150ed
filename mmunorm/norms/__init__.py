"""The normalization layers; importing them registers them in mmengine's root MODELS."""
from .base import OfflineNorm
from .replace import replace_norms
from .un import UN, UN2d

__all__ = ['OfflineNorm', 'UN', 'UN2d', 'replace_norms']
