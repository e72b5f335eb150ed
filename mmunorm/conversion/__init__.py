"""Converts models with LayerNorm to offline norms: calibration, distillation, configs and checkpoints."""
from ..registry import MISSING, explain_missing
from .adaptation import AdaptReport, adapt
from .agreement import Agreement, agreement
from .convert import ConversionError, convert_loaded, convert_norms, with_layer_norms
from .report import ConversionReport, ConvertedNorm
from .update import update_norms

if not MISSING:
    from .checkpoint import converted_model

__all__ = [
    'AdaptReport', 'Agreement', 'ConversionError', 'ConversionReport', 'ConvertedNorm', 'adapt',
    'agreement', 'convert_loaded', 'convert_norms', 'converted_model', 'update_norms', 'with_layer_norms'
]
__getattr__ = explain_missing(__name__, __all__)
