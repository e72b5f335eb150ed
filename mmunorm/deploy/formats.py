"""The formats that a model can be exported to."""
from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from ..errors import PreflightError

EXTRA = "pip install -e '.[deploy]'"


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Attributes:
        name: what `--format` takes.
        suffix: of the file.
        devices: where its runtime works.
        flags: options of the exporter that it allows.
        packages: what the export imports.
        install: how to get them.
        int8_packages: what it imports besides for INT8.
    """
    name: str
    suffix: str
    devices: tuple[str, ...]
    flags: tuple[str, ...]
    packages: tuple[str, ...]
    install: str = EXTRA
    int8_packages: tuple[str, ...] = ()


FORMATS = {each.name: each for each in (
    Format('onnx', '.onnx', ('CPU', 'GPU'), ('half', 'int8', 'dynamic'), ('onnx', 'onnxscript', 'onnxruntime')),
    Format('openvino', '.xml', ('CPU', ), ('half', 'int8', 'dynamic'), ('onnx', 'onnxscript', 'openvino'),
           int8_packages=('nncf', )),
    # An engine with open shapes needs a range of them to be tuned for; nobody has asked for that.
    Format('tensorrt', '.engine', ('GPU', ), ('half', 'int8'), ('onnx', 'onnxscript', 'onnxruntime', 'tensorrt'),
           f'{EXTRA} tensorrt'),
)}


def table() -> str:
    """The formats as text, for `--help`."""
    rows = [('format', 'suffix', 'runs on', 'options')]
    rows += [(each.name, each.suffix, ', '.join(each.devices), ' '.join(f'--{flag}' for flag in each.flags))
             for each in FORMATS.values()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)


def find_format(name: str, flags: tuple[str, ...] = ()) -> Format:
    """The format of a name, if it takes these flags and this machine can make it.

    Args:
        name (str): such as 'onnx'.
        flags (tuple[str]): options that are set, such as 'half'.

    Raises:
        PreflightError: there is no such format, it lacks a flag, or a package or a GPU is missing.
    """
    if name not in FORMATS:
        near = difflib.get_close_matches(name.lower(), FORMATS, n=1, cutoff=0.3)
        meant = f': did you mean {near[0]}?' if near else '.'
        raise PreflightError(f'--format must be one of {", ".join(FORMATS)}, got {name!r}{meant}')
    chosen = FORMATS[name]
    for flag in flags:
        if flag not in chosen.flags:
            others = [each.name for each in FORMATS.values() if flag in each.flags]
            raise PreflightError(f'--{flag} does not go with --format {name}; it does with {" and ".join(others)}.')
    if 'CPU' not in chosen.devices and not torch.cuda.is_available():
        raise PreflightError(f'--format {name} needs an NVIDIA GPU, of the kind that will run the file, and torch sees '
                             'none here. A file of --format onnx can be moved to such a machine.')
    need(*chosen.packages, *(chosen.int8_packages if 'int8' in flags else ()), install=chosen.install)
    if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 9):
        raise PreflightError(f'the exporter needs torch 2.9 or newer, and this Python has {torch.__version__}.')
    return chosen


def need(*packages: str, install: str = EXTRA) -> None:
    """Checks that packages are installed.

    Raises:
        PreflightError: one is not; the message says how to get it.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise PreflightError(f'missing: {", ".join(missing)}; get it with {install}')
