"""What plugs into mmengine's Runner."""
from .amp import BFloat16OptimWrapper
from .ema import BufferedEMA
from .fusing import FuseNormsHook
from .hooks import UNWarmupHook
from .optimizer import DefaultOptimWrapperConstructor, LearningRateDecayOptimWrapperConstructor

__all__ = [
    'BFloat16OptimWrapper', 'BufferedEMA', 'DefaultOptimWrapperConstructor', 'FuseNormsHook',
    'LearningRateDecayOptimWrapperConstructor', 'UNWarmupHook'
]
