"""Benchmarks of models: the effect of folding (Table 8), and exported files beside each other."""
