"""Measures what a run's norms do, step by step, and keeps it in a folder. Reading the folder needs no Runner."""
