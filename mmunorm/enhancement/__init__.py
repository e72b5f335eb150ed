"""Enhancers of dark images: by themselves, and before detectors and classifiers."""
from . import fold_rules  # noqa: F401  registers them
from .iat import IAT
from .model import ImageEnhancer, PairDataPreprocessor
from .preprocessor import EnhancingPreprocessor
from .quality import ImageQuality

__all__ = ['IAT', 'EnhancingPreprocessor', 'ImageEnhancer', 'ImageQuality', 'PairDataPreprocessor']
