"""What a run's norms and residual layers did: hooks that record it, and readers and figures that need no Runner."""
from .layer_statistics import LayerStatisticsHook
from .norm_record import NormRecord, RecordError
from .norm_statistics import NormStatisticsHook

__all__ = ['LayerStatisticsHook', 'NormRecord', 'NormStatisticsHook', 'RecordError']
