"""Benchmarks and comparisons of models: the effect of folding (Table 8), exported files, norms and seeds."""
