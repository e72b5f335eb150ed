"""The fold rules of the stock blocks of mmpretrain with mmcv, mmdet, and timm."""
from ..registry import MISSING
from . import timm  # noqa: F401  they register themselves

if not MISSING:
    from . import mmdet, mmpretrain  # noqa: F401
