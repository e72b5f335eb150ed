"""Folding without a rule: what reads each norm is looked up in the model's graph, on an example input.

`labels` carries where values come from through operators, `trace` runs the model, `traced` is what that has seen, and
`place` decides.
"""
