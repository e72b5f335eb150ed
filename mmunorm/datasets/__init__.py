"""Data sets: makers of small ones, converters, and what mmengine's data loaders read."""
from .handwriting import HandwrittenDigits
from .made_folder import FolderError

__all__ = ['FolderError', 'HandwrittenDigits', 'make_digits']


def __getattr__(name: str):
    # It needs scipy and scikit-learn, which a training run does not.
    if name == 'make_digits':
        from .digits import make_digits
        return make_digits
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
