"""What plugs into mmengine's Runner."""
from .hooks import UNWarmupHook
from .optimizer import DefaultOptimWrapperConstructor

__all__ = ['DefaultOptimWrapperConstructor', 'UNWarmupHook']
