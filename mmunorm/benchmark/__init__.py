"""Benchmarks of models: the effect of folding (Table 8), and the formats of exported files."""
