"""Deployment: exports a trained model to a file for a runtime such as ONNX Runtime, and runs that file."""
from ..registry import MISSING, explain_missing
from .formats import FORMATS
from .runtime import ExportedModel
from .saving import export_file

if not MISSING:
    from .openmmlab import describe_model, prepare_export

__all__ = ['FORMATS', 'ExportedModel', 'describe_model', 'export_file', 'prepare_export']
__getattr__ = explain_missing(__name__, ('describe_model', 'prepare_export'))
