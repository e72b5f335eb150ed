"""Finds the targets of norms by tracing a run.

`labels` tracks channels through operators, `trace` runs the model and fills `traced`, `place` chooses the targets.
"""
