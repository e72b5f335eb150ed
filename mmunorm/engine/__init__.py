"""What plugs into mmengine's Runner."""
from .amp import BFloat16OptimWrapper
from .divergence import DivergenceError, DivergenceHook
from .ema import BufferedEMA
from .fusing import FuseNormsHook
from .hooks import UNWarmupHook
from .loss_scale import LossScaleHook, set_loss_scale
from .optimizer import DefaultOptimWrapperConstructor, LearningRateDecayOptimWrapperConstructor
from .ranks import AverageStatisticsHook, SyncNormsHook, average_statistics
from .recording import NormStatisticsHook
from .resume import RepeatableHook
from .stress import InputStressHook

__all__ = [
    'AverageStatisticsHook', 'BFloat16OptimWrapper', 'BufferedEMA', 'DefaultOptimWrapperConstructor',
    'DivergenceError', 'DivergenceHook', 'FuseNormsHook', 'InputStressHook',
    'LearningRateDecayOptimWrapperConstructor', 'LossScaleHook', 'NormStatisticsHook', 'RepeatableHook',
    'SyncNormsHook', 'UNWarmupHook', 'average_statistics', 'set_loss_scale'
]
