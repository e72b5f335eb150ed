"""Data sets: scripts that make small ones, and data sets for mmengine's data loaders."""
from .atomic_folder import FolderError
from .handwriting import HandwrittenDigits

__all__ = ['FolderError', 'HandwrittenDigits', 'make_digits']


def __getattr__(name: str):
    # Lazily, because it needs scipy and scikit-learn, which training does not.
    if name == 'make_digits':
        from .digits import make_digits
        return make_digits
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
