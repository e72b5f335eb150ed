"""Small data sets of handwritten digits, on which two CPU cores train classifiers and detectors in minutes.

Importing it registers HandwrittenDigits, and BFloat16OptimWrapper for mixed precision on a CPU.
"""
from .amp import BFloat16OptimWrapper
from .handwriting import HandwrittenDigits

__all__ = ['BFloat16OptimWrapper', 'HandwrittenDigits']
