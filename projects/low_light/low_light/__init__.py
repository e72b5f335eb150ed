"""Enhancers of dark images: alone, and before detectors and classifiers."""
from . import fold_rules, released  # noqa: F401  registers them
from .exdark import ExDarkDataset
from .iat import IAT
from .model import ImageEnhancer, PairDataPreprocessor
from .pairs import LoadPair, PackPair, PairDataset, RandomCropPair, RandomFlipPair
from .preprocessor import EnhancingPreprocessor
from .quality import ImageQuality

__all__ = ['IAT', 'EnhancingPreprocessor', 'ExDarkDataset', 'ImageEnhancer', 'ImageQuality', 'LoadPair', 'PackPair',
           'PairDataPreprocessor', 'PairDataset', 'RandomCropPair', 'RandomFlipPair']
