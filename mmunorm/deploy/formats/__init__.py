"""The runtimes, one file each. A new one is a :class:`Format` in a file of its own, and an entry of `FORMATS`."""
from __future__ import annotations

import difflib
from pathlib import Path

from ...utils import PreflightError
from .base import Form, Format, Session, need
from .ethos_u import EthosU
from .executorch import ExecuTorch
from .litert import LiteRt
from .onnx import Onnx
from .openvino import OpenVino
from .pytorch import Torch

__all__ = ['FORMATS', 'FORMS', 'Form', 'Format', 'Session', 'find_format', 'need', 'open_file', 'table']

FORMATS: dict[str, Format] = {each.name: each for each in (Onnx(), OpenVino(), LiteRt(), EthosU(), ExecuTorch())}
# What tools/deploy/benchmark.py measures, by the name of the row: the format and its form, INT8 last.
FORMS: dict[str, tuple[Format, Form]] = dict(sorted(
    ((name, (each, form)) for each in (Torch(), *FORMATS.values()) for name, form in each.forms.items()),
    key=lambda item: item[1][1].int8 is not None))


def table() -> str:
    """The formats as text, for `--help`."""
    rows = [('format', 'suffix', 'runs in', '--int8'),
            *((each.name, each.suffixes[0], each.runtime, ', '.join(each.int8_kinds)) for each in FORMATS.values())]
    return '\n'.join(f'{name:10}  {suffix:12}  {runtime:18}  {kinds}'.rstrip() for name, suffix, runtime, kinds in rows)


def find_format(name: str, int8: bool = False) -> Format:
    """The format of a name such as 'onnx', if this machine can make it, for `int8` in INT8.

    Raises:
        PreflightError: there is no such format, a package is missing, or torch is too old.
    """
    if name not in FORMATS:
        near = difflib.get_close_matches(name.lower(), FORMATS, n=1, cutoff=0.3)
        meant = f': did you mean {near[0]}?' if near else '.'
        raise PreflightError(f'--format must be one of {", ".join(FORMATS)}, got {name!r}{meant}')
    chosen = FORMATS[name]
    chosen.check(int8)
    return chosen


def open_file(path: str | Path, threads: int | None = None) -> Session:
    """An exported model, ready to run; its suffix tells the format.

    Raises:
        PreflightError: as :meth:`Format.open`, or the suffix is unknown.
    """
    path = Path(path)
    for each in sorted(FORMATS.values(), key=lambda each: -len(each.suffixes[0])):
        if path.name.endswith(each.suffixes[0]):
            return each.open(path, threads)
    suffixes = ' or '.join(each.suffixes[0] for each in FORMATS.values())
    raise PreflightError(f'an exported model ends with {suffixes}, got {path}.')
