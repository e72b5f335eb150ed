"""Backbones in which one `norm_cfg` applies to every norm."""
from . import fold_rules  # noqa: F401  registers them
from .swin import UNSwinTransformer
from .t2t_vit import UNT2TViT

__all__ = ['UNSwinTransformer', 'UNT2TViT']
