"""Deep networks: what each residual layer does while a model trains."""
from .layer_statistics import LayerStatisticsHook

__all__ = ['LayerStatisticsHook']
