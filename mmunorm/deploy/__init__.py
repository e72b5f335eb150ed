"""Deployment: exports a trained model to a file for a runtime such as ONNX Runtime, and runs that file."""
from ..registry import MISSING, explain_missing
from .api import Comparison, compare
from .formats import FORMATS, find_format
from .graph import Exportable
from .runtime import Detections, ExportedModel
from .saving import ExportReport, export_file

if not MISSING:
    from .openmmlab import describe_model, prepare_export

__all__ = ['FORMATS', 'Comparison', 'Detections', 'ExportReport', 'Exportable', 'ExportedModel', 'compare',
           'describe_model', 'export_file', 'find_format', 'prepare_export']
__getattr__ = explain_missing(__name__, ('describe_model', 'prepare_export'))
