"""Shipping: a trained model as one file for ONNX Runtime or OpenVINO, and what runs that file."""
from .export import Traced, describe_model, trace
from .formats import FORMATS, find_format
from .runner import Detections, Runner
from .saving import Exported, save

__all__ = ['FORMATS', 'Detections', 'Exported', 'Runner', 'Traced', 'describe_model', 'find_format', 'save', 'trace']
