"""Hooks, optimizer wrappers and constructors for mmengine's Runner."""
from ..registry import MISSING, explain_missing
from .fusion import FuseNormsHook

if not MISSING:
    from .distillation import DistillationHook
    from .offline_norms import OfflineNormHook, SyncNormsHook, average_statistics, set_loss_scale
    from .optimizer import DefaultOptimWrapperConstructor, LearningRateDecayOptimWrapperConstructor

__all__ = [
    'DefaultOptimWrapperConstructor', 'DistillationHook', 'FuseNormsHook', 'LearningRateDecayOptimWrapperConstructor',
    'OfflineNormHook', 'SyncNormsHook', 'average_statistics', 'set_loss_scale'
]
__getattr__ = explain_missing(__name__, __all__)
