"""What the tools in tools/analysis share."""
from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..engine.errors import PreflightError
from .figures import DPI
from .record import FILENAME, Record, RecordError
from .sources import find_record, refuse_twice, run_names


def add_record_arguments(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Adds `record`, one or several, and `--out`."""
    parser.add_argument('record', nargs=nargs, metavar='RECORD',
                        help=f'a work directory, its {FILENAME}, or a config whose work directory is '
                        'work_dirs/CONFIG')
    parser.add_argument('--out', required=True, help='folder for pictures and numbers')


def read_records(sources: Sequence[str]) -> tuple[list[Record], list[str]]:
    """Records and the names of their runs.

    Raises:
        RecordError: there is no record, or it holds no step, or two are one.
    """
    records = [find_record(source) for source in sources]
    refuse_twice([record.path for record in records])
    return records, run_names(records)


def clear_record_errors(main):
    """Turns a RecordError of a tool's `main` into a PreflightError."""

    @functools.wraps(main)
    def wrapper(argv=None):
        try:
            return main(argv)
        except RecordError as error:
            raise PreflightError(str(error)) from error

    return wrapper


def out_folder(path: str) -> Path:
    """The folder for results, made if need be.

    Raises:
        PreflightError: there is something else of this name.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise PreflightError(f'--out {path}: is or lies under a file; name a folder.') from error
    return folder


def suffixes(records: Sequence[Record]) -> list[str]:
    """What tells the files of several runs apart: nothing for one run, else `_1`, `_2`, ..."""
    return [''] if len(records) == 1 else [f'_{i}' for i in range(1, len(records) + 1)]


def save(figure: Figure, path: Path) -> None:
    """Writes a picture."""
    figure.savefig(path, dpi=DPI)
