"""From a LayerNorm checkpoint to offline norms: calibration, configs and checkpoints."""
from .adapt import adapt, with_layer_norms
from .checkpoint import converted_model
from .convert import ConversionError, convert_loaded, convert_norms
from .report import ConversionReport, ConvertedNorm

__all__ = [
    'ConversionError', 'ConversionReport', 'ConvertedNorm', 'adapt', 'convert_loaded', 'convert_norms',
    'converted_model', 'with_layer_norms'
]
