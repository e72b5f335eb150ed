"""The fold rules of models of mmpretrain, mmdet and timm, and of the Swins of these, torchvision and transformers."""
from ...registry import MISSING
from . import filled, timm  # noqa: F401  they register themselves

if not MISSING:
    from . import mmdet, mmpretrain  # noqa: F401
