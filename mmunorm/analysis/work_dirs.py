"""Work directories of training runs and their measures, for the report."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..recording.norm_record import FOLDER, NormRecord, RecordError
from .curves import Scalars, read_scalars
from .measures import (
    FIELDS,
    ChannelHistory,
    MeanShares,
    PNACOverTraining,
    around_peak,
    channel_history,
    interesting_channel,
    interesting_layers,
    measure_mean_shares,
    measure_pnac,
)
from .outliers import accumulated_outliers
from .sources import distinct_names, find_record, refuse_twice

# M, the number of steps in the means of single channels.
WINDOW = 4


@dataclass(frozen=True)
class WorkDir:
    """What a work directory has. A missing `record` is None; missing `scalars` and `config_name` are empty.

    `config_name` is the file name of the run's config. It is not read: a config is code.
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
        """The norms that the record names."""
        if self.record is None:
            return ''
        return ', '.join(dict.fromkeys(layer.norm for layer in self.record.layers))

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
    refuse_twice(folders)
    runs = []
    for name, folder in zip(distinct_names(folders), map(Path, folders), strict=True):
        record = find_record(folder) if (folder / FOLDER).is_dir() else None
        try:
            scalars = read_scalars(folder)
        except FileNotFoundError:
            scalars = {}
        except ValueError as error:
            raise RecordError(f'{error}.') from error
        if record is None and not scalars:
            raise RecordError(f'{folder} has neither a record ({FOLDER}) nor a log '
                              '(TIME/vis_data/scalars.json): it is not the work directory of a training run.')
        config_name = record.info.get('config') if record is not None else None
        if not config_name:
            config_name = min((path.name for path in folder.glob('*.py')), default='')
        runs.append(WorkDir(name, folder, record, scalars, config_name))
    return runs


class MeasuredRun(NamedTuple):
    """A run and its measures.

    Attributes:
        run (WorkDir): the run.
        pnac (PNACOverTraining | None): its PNAC.
        histories (list[ChannelHistory]): single channels, around their highest peaks.
        outliers (tuple | None): layers, steps and counts of :func:`accumulated_outliers`.
        mean_shares (MeanShares | None): how much of each norm's input is its mean.
        missing (list[str]): sentences about what could not be measured because the record is too short.
    """
    run: WorkDir
    pnac: PNACOverTraining | None
    histories: list[ChannelHistory]
    outliers: tuple[list[str], np.ndarray, np.ndarray] | None
    mean_shares: MeanShares | None
    missing: list[str]


def measure_work_dirs(runs: Sequence[WorkDir], span: int | None = None, progress: bool = False) -> list[MeasuredRun]:
    """Measures runs.

    Args:
        runs: work directories, as :func:`read_work_dirs` reads them.
        span (int, optional): recorded steps of a span for PNAC. Defaults to None: 100, or all if fewer.
        progress (bool): whether to show progress bars. Defaults to False.

    Raises:
        RecordError: `span` does not fit a record.
    """
    return [MeasuredRun(run, *_measure(run, span, progress)) for run in runs]


def _measure(run: WorkDir, span: int | None, progress: bool):
    record = run.record
    if record is None:
        return None, [], None, None, []
    pnac, histories, outliers, missing = None, [], None, []
    try:
        pnac = measure_pnac(record, span, progress)
    except RecordError as error:
        if span is not None:
            raise
        missing.append(str(error))  # a record that is too short for the default is no reason to stop
    if len(record.steps) < WINDOW:
        missing.append(f'{run.label}: fewer than {WINDOW} steps are recorded.')
    else:
        for layer in interesting_layers(record, 3):
            channel = interesting_channel(record, layer)
            rows = around_peak(record, layer, channel)
            histories += [channel_history(record, layer, channel, field, WINDOW, rows) for field in FIELDS]
    if run.outlier_share is not None:
        outliers = accumulated_outliers(record)
    return pnac, histories, outliers, measure_mean_shares(record), missing
