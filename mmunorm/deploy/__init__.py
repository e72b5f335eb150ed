"""Shipping: a trained model as one file for a runtime such as ONNX Runtime, and what runs that file."""
from .export import Exportable, describe_model, prepare_export
from .exported import Detections, ExportedModel
from .formats import FORMATS, find_format
from .saving import ExportReport, export_file

__all__ = ['FORMATS', 'Detections', 'Exportable', 'ExportReport', 'ExportedModel', 'describe_model', 'export_file',
           'find_format', 'prepare_export']
