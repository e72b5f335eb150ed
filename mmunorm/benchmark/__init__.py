"""Measures and trains several models side by side: what folding gains (Table 8), exported files, norms and seeds."""
from .folding import Settings, run_benchmark
from .output import write_results
from .table import chart, markdown

__all__ = ['Settings', 'chart', 'markdown', 'run_benchmark', 'write_results']
