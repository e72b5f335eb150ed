"""What plugs into mmengine's Runner."""
from .amp import BFloat16OptimWrapper
from .ema import BufferedEMA
from .hooks import UNWarmupHook
from .optimizer import DefaultOptimWrapperConstructor, LearningRateDecayOptimWrapperConstructor
from .recording import NormStatisticsHook

__all__ = [
    'BFloat16OptimWrapper', 'BufferedEMA', 'DefaultOptimWrapperConstructor',
    'LearningRateDecayOptimWrapperConstructor', 'NormStatisticsHook', 'UNWarmupHook'
]
