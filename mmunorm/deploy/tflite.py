"""Reads and writes LiteRT files as objects of their schema."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def changed(path: Path) -> Iterator:
    """A context with the file as an object of LiteRT's schema, which is written back at its end."""
    from ai_edge_litert.tools import flatbuffer_utils
    file = flatbuffer_utils.read_model(path)
    yield file
    flatbuffer_utils.write_model(file, path)


def kind_of(model, operator) -> str:
    """The name of an operator, such as 'ADD'."""
    from ai_edge_litert.tools import flatbuffer_utils
    return flatbuffer_utils.opcode_to_name(model, operator.opcodeIndex)
