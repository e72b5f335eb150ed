"""Deep networks: residual schemes and backbones that take them, initialization, and statistics of each layer."""
from . import fold_rules, init, residuals  # noqa: F401  register themselves
from .layer_statistics import LayerStatisticsHook
from .ntk_hook import NTKHook
from .residual_hook import ResidualHook
from .residuals import count_updates, profile_admin
from .swin import ResidualSwinTransformer
from .t2t_vit import ResidualT2TViT
from .vit import UNVisionTransformer

__all__ = ['LayerStatisticsHook', 'NTKHook', 'ResidualHook', 'ResidualSwinTransformer', 'ResidualT2TViT',
           'UNVisionTransformer', 'count_updates', 'profile_admin']
