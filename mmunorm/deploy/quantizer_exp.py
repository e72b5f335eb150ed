"""EXP in LiteRT's integer files, which a Performer needs.

LiteRT computes EXP in INT8 and INT16, but AI Edge Quantizer 0.10 does not know the operator: it leaves it in floating
point. So EXP has the name of another operator while the quantizer reads the file. `tests/deploy/test_quantizer_exp.py`
fails once the quantizer knows EXP; then this file goes.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .tflite import changed, kind_of


@contextmanager
def exp_renamed(path: Path) -> Iterator[None]:
    """Within it, the EXP of a file are an operator that the file has not got, and that has no settings either."""
    with changed(path) as file:
        used = {kind_of(file, operator) for graph in file.subgraphs for operator in graph.operators}
        other = next(name for name in ('SQRT', 'HARD_SWISH') if name not in used)
        _rename(file, 'EXP', other)
    yield
    with changed(path) as file:
        _rename(file, other, 'EXP')


def _rename(file, old: str, new: str) -> None:
    from ai_edge_litert.schema_py_generated import BuiltinOperator
    for code in file.operatorCodes:
        if code.builtinCode == getattr(BuiltinOperator, old):
            code.builtinCode = code.deprecatedBuiltinCode = getattr(BuiltinOperator, new)
