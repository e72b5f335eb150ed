"""Text of translations: subwords, data sets, batches and scores."""
from .batches import TokenBatchSampler
from .dataset import TranslationDataset, pad_translations
from .ids import BOS, EOS, PAD, UNK
from .metric import TranslationScore
from .subwords import Subwords, check_vocabulary

__all__ = ['BOS', 'EOS', 'PAD', 'UNK', 'Subwords', 'TokenBatchSampler', 'TranslationDataset', 'TranslationScore',
           'check_vocabulary', 'pad_translations']
