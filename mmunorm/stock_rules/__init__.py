"""The fold rules of the stock blocks of mmpretrain with mmcv, mmdet, and timm."""
from . import mmdet, mmpretrain, timm  # noqa: F401  register themselves
