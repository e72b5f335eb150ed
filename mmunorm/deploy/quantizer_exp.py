"""Quantization of EXP in LiteRT files, which a Performer needs.

LiteRT supports EXP in INT8 and INT16, but AI Edge Quantizer 0.10 does not know the operator and leaves it in floating
point. So EXP is renamed to another operator while the quantizer runs. `tests/deploy/test_quantizer_exp.py` fails once
the quantizer supports EXP; then remove this file.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .tflite import changed, kind_of, read


@contextmanager
def exp_renamed(path: Path) -> Iterator[None]:
    """A context in which EXP in a file is renamed to an operator that neither the file nor the settings contain."""
    file = read(path)
    used = {kind_of(file, operator) for graph in file.subgraphs for operator in graph.operators}
    if 'EXP' not in used:
        yield
        return
    other = next(name for name in ('SQRT', 'HARD_SWISH') if name not in used)
    with changed(path) as file:
        _rename(file, 'EXP', other)
    yield
    with changed(path) as file:
        _rename(file, other, 'EXP')


def _rename(file, old: str, new: str) -> None:
    from ai_edge_litert.schema_py_generated import BuiltinOperator
    for code in file.operatorCodes:
        if code.builtinCode == getattr(BuiltinOperator, old):
            code.builtinCode = code.deprecatedBuiltinCode = getattr(BuiltinOperator, new)
