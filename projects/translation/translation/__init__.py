"""Translation: an encoder-decoder Transformer with any norm and any residual scheme, its task, search and text."""
from projects.digits.digits import amp  # noqa: F401  registers BFloat16OptimWrapper

from . import fold_rules, text  # noqa: F401  register themselves
from .model import TranslationModel
from .schedule import InverseSquareRoot
from .transformer import UNTransformer

__all__ = ['InverseSquareRoot', 'TranslationModel', 'UNTransformer']
