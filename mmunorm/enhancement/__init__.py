"""Enhancers of dark pictures: by themselves, and in front of detectors and classifiers."""
from .iat import IAT

__all__ = ['IAT']
