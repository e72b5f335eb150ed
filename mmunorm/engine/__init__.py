"""What plugs into mmengine's Runner."""
from .amp import BFloat16OptimWrapper
from .divergence import DivergenceError, DivergenceHook
from .ema import BufferedEMA
from .fusing import FuseNormsHook
from .hooks import UNWarmupHook
from .optimizer import DefaultOptimWrapperConstructor, LearningRateDecayOptimWrapperConstructor
from .recording import NormStatisticsHook
from .stress import InputStressHook

__all__ = [
    'BFloat16OptimWrapper', 'BufferedEMA', 'DefaultOptimWrapperConstructor', 'DivergenceError',
    'DivergenceHook', 'FuseNormsHook', 'InputStressHook', 'LearningRateDecayOptimWrapperConstructor',
    'NormStatisticsHook', 'UNWarmupHook'
]
