"""What folding the norms of a model gains (Table 8), beside LN and beside no norm at all."""
from .report import chart, markdown, write_results
from .run import Settings, run_benchmark

__all__ = ['Settings', 'chart', 'markdown', 'run_benchmark', 'write_results']
