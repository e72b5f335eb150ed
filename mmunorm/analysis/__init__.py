"""What a run's norms did: a hook that records it, and readers and figures that need no Runner."""
from .norm_record import NormRecord, RecordError
from .norm_statistics import NormStatisticsHook

__all__ = ['NormRecord', 'NormStatisticsHook', 'RecordError']
