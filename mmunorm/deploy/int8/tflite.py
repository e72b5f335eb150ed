"""Reads and writes LiteRT files as objects of their schema."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np


def read(path: Path):
    """The file as an object of LiteRT's schema."""
    from ai_edge_litert.tools import flatbuffer_utils
    file = flatbuffer_utils.read_model(path)
    for buffer in file.buffers:  # all but arrays are written byte by byte in Python, a minute for 10 MB
        if buffer.data is not None and not isinstance(buffer.data, np.ndarray):
            buffer.data = np.frombuffer(bytes(buffer.data), np.uint8)
    return file


@contextmanager
def changed(path: Path) -> Iterator:
    """A context with the file as an object of LiteRT's schema, which is written back at its end."""
    from ai_edge_litert.tools import flatbuffer_utils
    file = read(path)
    yield file
    flatbuffer_utils.write_model(file, path)


def kind_of(model, operator) -> str:
    """The name of an operator, such as 'ADD'."""
    from ai_edge_litert.tools import flatbuffer_utils
    return flatbuffer_utils.opcode_to_name(model, operator.opcodeIndex)
