"""From a LayerNorm checkpoint to offline norms: calibration, configs and checkpoints."""
from .checkpoint import converted_model
from .convert import ConversionError, convert_loaded, convert_norms
from .report import ConversionReport, ConvertedNorm

__all__ = ['ConversionError', 'ConversionReport', 'ConvertedNorm', 'convert_loaded', 'convert_norms', 'converted_model']
