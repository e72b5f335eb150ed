"""The formats that a model can be exported to."""
from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from ..utils import PreflightError


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Attributes:
        name: what `--format` takes.
        suffix: of the file.
        runtime: what runs it.
        packages: what the export imports.
        int8_packages: what it imports besides for INT8.
    """
    name: str
    suffix: str
    runtime: str
    packages: tuple[str, ...]
    int8_packages: tuple[str, ...] = ()


FORMATS = {each.name: each for each in (
    Format('onnx', '.onnx', 'ONNX Runtime', ('onnx', 'onnxscript', 'onnxruntime')),
    Format('openvino', '.xml', 'OpenVINO', ('onnx', 'onnxscript', 'openvino'), int8_packages=('nncf', )),
)}


def table() -> str:
    """The formats as text, for `--help`."""
    rows = [('format', 'suffix', 'runs in')]
    rows += [(each.name, each.suffix, each.runtime) for each in FORMATS.values()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)


def find_format(name: str, int8: bool = False) -> Format:
    """The format of a name, if this machine can make it.

    Args:
        name (str): such as 'onnx'.
        int8 (bool): whether the file is to be in INT8. Defaults to False.

    Raises:
        PreflightError: there is no such format, or a package is missing.
    """
    if name not in FORMATS:
        near = difflib.get_close_matches(name.lower(), FORMATS, n=1, cutoff=0.3)
        meant = f': did you mean {near[0]}?' if near else '.'
        raise PreflightError(f'--format must be one of {", ".join(FORMATS)}, got {name!r}{meant}')
    chosen = FORMATS[name]
    need(*chosen.packages, *(chosen.int8_packages if int8 else ()))
    if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 9):
        raise PreflightError(f'the exporter needs torch 2.9 or newer, and this Python has {torch.__version__}.')
    return chosen


def need(*packages: str) -> None:
    """Checks that packages are installed.

    Raises:
        PreflightError: one is not; the message says how to get it.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise PreflightError(f"missing: {', '.join(missing)}; get it with pip install -e '.[deploy]'")
