"""Converts models with LayerNorm to offline norms, with torch alone: calibration and distillation."""
from .adaptation import AdaptReport, adapt
from .agreement import Agreement, agreement
from .convert import ConversionError, convert_loaded, convert_norms, with_layer_norms
from .report import ConversionReport, ConvertedNorm
from .update import update_norms

__all__ = [
    'AdaptReport', 'Agreement', 'ConversionError', 'ConversionReport', 'ConvertedNorm', 'adapt',
    'agreement', 'convert_loaded', 'convert_norms', 'update_norms', 'with_layer_norms'
]
