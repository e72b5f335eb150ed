"""Statistics of norms during training: a hook that records them, and readers and figures that need no Runner."""
from .norm_record import NormRecord, RecordError
from .norm_statistics import NormStatisticsHook

__all__ = ['NormRecord', 'NormStatisticsHook', 'RecordError']
