"""Arguments for norm records, and file names of their outputs, for the tools of this project."""
from __future__ import annotations

import argparse
from collections.abc import Sequence

from .norm_record import FOLDER, NormRecord
from .work_dirs import check_unique, find_record, run_names


def add_record_arguments(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Adds `record`, one or several, and `--out`."""
    parser.add_argument('record', nargs=nargs, metavar='RECORD',
                        help=f'a work directory, its folder {FOLDER}, or a config whose work directory is '
                        'work_dirs/CONFIG')
    parser.add_argument('--out', required=True, help='folder for images and numbers')


def read_records(sources: Sequence[str]) -> tuple[list[NormRecord], list[str]]:
    """Reads records; returns them and the names of their runs.

    Raises:
        RecordError: a record is missing or empty, or two of them are the same.
    """
    records = [find_record(source) for source in sources]
    check_unique([record.path for record in records])
    return records, run_names(records)


def suffixes(records: Sequence[NormRecord]) -> list[str]:
    """A suffix for the files of each run: '' for a single run, else `_1`, `_2`, ..."""
    return [''] if len(records) == 1 else [f'_{i}' for i in range(1, len(records) + 1)]
