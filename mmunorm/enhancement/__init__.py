"""Enhancers of dark pictures: by themselves, and in front of detectors and classifiers."""
from . import fold_rules  # noqa: F401  registers them
from .iat import IAT
from .in_front import EnhancingPreprocessor
from .model import ImageEnhancer, PairDataPreprocessor
from .quality import ImageQuality

__all__ = ['IAT', 'EnhancingPreprocessor', 'ImageEnhancer', 'ImageQuality', 'PairDataPreprocessor']
