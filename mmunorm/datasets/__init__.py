"""Data sets: makers of small ones, converters, and what mmengine's data loaders read."""
from .handwriting import HandwrittenDigits
from .made_folder import FolderError
from .pairs import LoadPair, PackPair, PairDataset, RandomCropPair, RandomFlipPair

_MAKERS = ('CLASSES', 'make_classification_set', 'make_dark_set', 'make_detection_set', 'make_digits')

__all__ = ['CLASSES', 'FolderError', 'HandwrittenDigits', 'LoadPair', 'PackPair', 'PairDataset', 'RandomCropPair',
           'RandomFlipPair', 'make_classification_set', 'make_dark_set', 'make_detection_set', 'make_digits']


def __getattr__(name: str):
    # The makers need scipy and scikit-learn, which a training run does not.
    if name in _MAKERS:
        from . import digits
        return getattr(digits, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
