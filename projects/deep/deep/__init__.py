"""Deep networks: statistics of each residual layer during training."""
from .layer_statistics import LayerStatisticsHook

__all__ = ['LayerStatisticsHook']
