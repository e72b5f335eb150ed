"""The fold rules of models of mmpretrain, mmdet and timm, and of the Swins of these, torchvision and transformers."""
from . import filled, models  # noqa: F401  they register themselves
