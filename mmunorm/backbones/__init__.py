"""Backbones in which one `norm_cfg` applies to every norm, and one `residual_cfg` to every residual."""
from . import fold_rules  # noqa: F401  registers them
from .swin import UNSwinTransformer
from .t2t_vit import UNT2TViT
from .vit import UNVisionTransformer

__all__ = ['UNSwinTransformer', 'UNT2TViT', 'UNVisionTransformer']
