"""The paper's figures and comparisons: statistics of norms during training, CKA, stress, and runs of many norms.

Importing it registers its hooks: NormStatisticsHook, InputStressHook and DivergenceHook.
"""
from .divergence import DivergenceError, DivergenceHook
from .norm_record import NormRecord, RecordError
from .norm_statistics import NormStatisticsHook
from .stress import InputStressHook

__all__ = ['DivergenceError', 'DivergenceHook', 'InputStressHook', 'NormRecord', 'NormStatisticsHook', 'RecordError']
