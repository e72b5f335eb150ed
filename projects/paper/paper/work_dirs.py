"""Reads and measures work directories of training runs for the report."""
from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import measures
from .curves import METRICS, Scalars, read_scalars
from .norm_record import FOLDER, HEAD, NormRecord, RecordError

# M, the number of steps in the means of single channels.
WINDOW = 4


def find_record(source: str | Path) -> NormRecord:
    """The record of `source`: its folder, a work directory, or a config `NAME.py` that was trained in `work_dirs/NAME`.

    Raises:
        RecordError: there is no record, or it is empty.
    """
    path = Path(source)
    if path.suffix == '.py':
        path = Path('work_dirs', path.stem)
    if not path.is_dir():
        raise RecordError(f'{source}: there is no folder {path}.')
    record = NormRecord(path if (path / HEAD).is_file() else path / FOLDER)
    if not len(record.steps):
        raise RecordError(f'{record.path} has no steps yet: steps are written every 100 steps and with each '
                          'checkpoint.')
    return record


def check_unique(paths: Sequence[str | Path]) -> None:
    """Raises a RecordError if two of these paths, which exist, are one file or folder."""
    for i, path in enumerate(paths):
        if any(Path(path).samefile(other) for other in paths[:i]):
            raise RecordError(f'{path} is given twice.')


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """The shortest suffix of each path that distinguishes it from the others."""
    parts = [Path(os.path.realpath(path)).parts for path in paths]
    names = []
    for path in parts:
        depth = next((depth for depth in range(1, len(path))
                      if sum(other[-depth:] == path[-depth:] for other in parts) == 1), 1)
        names.append('/'.join(path[-depth:]))
    return names


def run_names(records: Sequence[NormRecord]) -> list[str]:
    """A name of each run for titles and legends: the work directory, or an older record's folder, and the norms."""
    paths = [record.path for record in records]
    names = distinct_names([path.parent if path.name == FOLDER else path for path in paths])
    return [f'{name} ({record.norms})' for name, record in zip(names, records, strict=True)]


@dataclass(frozen=True)
class WorkDir:
    """The content of a work directory. A missing `record` is None; missing `scalars` and `config_name` are empty.

    `config_name` is the file name of the run's config, which is not read because a config is code.
    """
    name: str
    folder: Path
    record: NormRecord | None
    scalars: Scalars
    config_name: str

    @property
    def label(self) -> str:
        """The name with the norms, for titles."""
        return f'{self.name} ({self.norms})' if self.norms else self.name

    @property
    def norms(self) -> str:
        """The norms in the record."""
        return '' if self.record is None else self.record.norms

    @property
    def last_step(self) -> int | None:
        """The last step of the log; None if there is no log."""
        return max((int(values[-1, 0]) for values in self.scalars.values()), default=None)

    def last_and_best(self, metric: str) -> tuple[float, float] | None:
        """The last and the highest finite value of a metric, if it has one."""
        values = self.scalars.get(metric, np.empty((0, 2)))[:, 1]
        values = values[np.isfinite(values)]
        return (float(values[-1]), float(values.max())) if len(values) else None

    @property
    def outlier_share(self) -> float | None:
        """The share of outlier steps, as a mean over the layers with a filter; None if no layer has one."""
        if self.record is None:
            return None
        last = self.record.outliers()[-1]
        last = last[last >= 0]
        return float(last.mean() / self.record.steps[-1]) if len(last) else None


def read_work_dirs(folders: Sequence[str | Path]) -> list[WorkDir]:
    """Reads work directories.

    Raises:
        RecordError: a path is not a folder, a folder has neither a record nor a log, or one of these is damaged.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise RecordError(f'there is no work directory {folder}.')
    check_unique(folders)
    return [_read_work_dir(name, Path(folder)) for name, folder in zip(distinct_names(folders), folders, strict=True)]


def _read_work_dir(name: str, folder: Path) -> WorkDir:
    record = find_record(folder) if (folder / FOLDER).is_dir() else None
    scalars = read_scalars(folder)
    if record is None and not scalars:
        raise RecordError(f'{folder} has neither a record ({FOLDER}) nor a log '
                          '(TIME/vis_data/scalars.json): not a work directory of a training run.')
    named = record.info.get('config') if record is not None else None
    return WorkDir(name, folder, record, scalars, named or min((path.name for path in folder.glob('*.py')), default=''))


class MeasuredRun(NamedTuple):
    """A run and its measures."""
    run: WorkDir
    pnac: measures.PNACOverTraining | None
    histories: list[measures.ChannelHistory]  # around their highest peaks
    outliers: measures.Outliers | None
    mean_shares: measures.MeanShares | None
    missing: list[str]  # sentences on measures for which the record is too short


def measure_work_dir(run: WorkDir, span: int | None = None) -> MeasuredRun:
    """Measures a run; `span` is that of :func:`.measures.measure_pnac`.

    Raises:
        RecordError: `span` does not fit a record.
    """
    record = run.record
    if record is None:
        return MeasuredRun(run, None, [], None, None, [])
    pnac, histories, missing = None, [], []
    try:
        pnac = measures.measure_pnac(record, span)
    except RecordError as error:
        if span is not None:
            raise
        missing.append(str(error))  # a record too short for the default is not an error
    if len(record.steps) < WINDOW:
        missing.append(f'{run.label}: fewer than {WINDOW} steps are recorded.')
    else:
        for layer in measures.evenly_spaced(record.layers, 3):
            channel = measures.peak_channel(record, layer)
            rows = measures.around_peak(record, layer, channel)
            histories += [measures.channel_history(record, layer, channel, field, WINDOW, rows)
                          for field in measures.FIELDS]
    outliers = None if run.outlier_share is None else measures.accumulated_outliers(record)
    return MeasuredRun(run, pnac, histories, outliers, measures.measure_mean_shares(record), missing)


def report_numbers(measured: Sequence[MeasuredRun], cka: Sequence[dict]) -> dict:
    """The numbers of the report, JSON-serializable: NaN and infinity become None."""
    return _plain(dict(runs=[_run_numbers(*item) for item in measured], cka=list(cka)))


def _run_numbers(run, pnac, histories, outliers, mean_shares, missing) -> dict:
    record = run.record
    return dict(
        name=run.name, config=run.config_name, norms=run.norms, work_directory=str(run.folder),
        last_logged_step=run.last_step,
        recorded=record and dict(steps=len(record.steps), first=record.steps[0], last=record.steps[-1],
                                 layers=[layer.name for layer in record.layers]),
        last_and_best={metric: run.last_and_best(metric) for metric in METRICS if metric in run.scalars},
        curves={name: run.scalars[name] for name in ('loss', *METRICS) if name in run.scalars},
        pnac=pnac and dict(span=pnac.span, first_steps=pnac.first, last_steps=pnac.last,
                           **{f'{field}_percent': pnac.percent(field) for field in measures.FIELDS}),
        channels=[history._asdict() for history in histories],
        outlier_share=run.outlier_share, outliers=outliers and outliers._asdict(),
        mean_shares=mean_shares and mean_shares._asdict(), missing=missing)


def _plain(value):
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
