"""What the tools take as input: a record, a work directory or a config."""
from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..recording.norm_record import FOLDER, NormRecord, RecordError


def find_record(source: str | Path) -> NormRecord:
    """Finds the record of a `source`.

    Args:
        source: the record's folder; or a work directory; or a config file `NAME.py`, whose work directory is
            `work_dirs/NAME`.

    Raises:
        RecordError: there is no record, or it holds no step.
    """
    path = Path(source)
    if path.suffix == '.py':
        path = Path('work_dirs', path.stem)
    if not path.is_dir():
        raise RecordError(f'{source}: there is no folder {path}.')
    record = NormRecord(path if (path / 'record.json').is_file() else path / FOLDER)
    if not len(record.steps):
        raise RecordError(f'{record.path} holds no step yet: steps are written a hundred at a time, and with each '
                          'checkpoint.')
    return record


def refuse_twice(paths: Sequence[str | Path]) -> None:
    """Raises a RecordError if two of these paths, which exist, are one file or folder."""
    for i, path in enumerate(paths):
        if any(Path(path).samefile(other) for other in paths[:i]):
            raise RecordError(f'{path} is named twice.')


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """The shortest end of each path that tells it from the others."""
    parts = [Path(os.path.realpath(path)).parts for path in paths]
    names = []
    for own in parts:
        depth = next((depth for depth in range(1, len(own))
                      if sum(other[-depth:] == own[-depth:] for other in parts) == 1), 1)
        names.append('/'.join(own[-depth:]))
    return names


def run_names(records: Sequence[NormRecord]) -> list[str]:
    """A name of each run for titles and legends: the work directory, and its norms.

    If the record's folder has another name than `norm_statistics`, such as an older record, that name is used.
    """
    paths = [record.path for record in records]
    names = distinct_names([path.parent if path.name == FOLDER else path for path in paths])
    norms = [', '.join(dict.fromkeys(layer.norm for layer in record.layers)) for record in records]
    return [f'{name} ({norm})' for name, norm in zip(names, norms, strict=True)]


def short_name(layer: str) -> str:
    """A layer's name as a short label, without the parts that all layers of a backbone share."""
    for long, short in (('backbone.', ''), ('stages.', 's'), ('.blocks.', '.b'), ('layers.', 'l'),
                        ('.downsample.', '.down.')):
        layer = layer.replace(long, short)
    return layer
