"""Measures what folding the norms of a model gains (Table 8), compared with LN and with no norm at all."""
from .report import write_results
from .run import Settings, run_benchmark
from .table import chart, markdown

__all__ = ['Settings', 'chart', 'markdown', 'run_benchmark', 'write_results']
