"""Backbones in which one `norm_cfg` reaches every norm."""
from .swin import UNSwinTransformer
from .t2t_vit import UNT2TViT

__all__ = ['UNSwinTransformer', 'UNT2TViT']
