"""From a LayerNorm checkpoint to offline norms: calibration, fading, distillation."""
from .checkpoint import converted_model
from .convert import ConversionError, convert_norms
from .fading import FadingNorm
from .report import ConversionReport, ConvertedNorm

__all__ = ['ConversionError', 'ConversionReport', 'ConvertedNorm', 'FadingNorm', 'convert_norms', 'converted_model']
