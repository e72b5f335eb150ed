"""The paper's figures and comparisons: statistics of norms during training, CKA, stress, and runs of many norms.

Importing it registers its hooks, NormStatisticsHook, InputStressHook and DivergenceHook, the norm PRepBN, and the
layout of SLAB's files.
"""
from . import slab  # noqa: F401  registers it
from .divergence import DivergenceError, DivergenceHook
from .norm_record import NormRecord, RecordError
from .norm_statistics import NormStatisticsHook
from .prep_bn import PRepBN
from .stress import InputStressHook

__all__ = ['DivergenceError', 'DivergenceHook', 'InputStressHook', 'NormRecord', 'NormStatisticsHook', 'PRepBN',
           'RecordError']
