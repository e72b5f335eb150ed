"""What folding the norms of a model gains (Table 8), beside LN and beside no norm at all."""
from .run import Settings, run_benchmark
from .table import chart, markdown, write_results

__all__ = ['Settings', 'chart', 'markdown', 'run_benchmark', 'write_results']
