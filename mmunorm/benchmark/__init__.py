"""Benchmarks and comparisons of models: the effect of folding (Table 8), exported files, norms and seeds."""
from .folding import Settings, run_benchmark
from .output import write_results
from .table import chart, markdown

__all__ = ['Settings', 'chart', 'markdown', 'run_benchmark', 'write_results']
