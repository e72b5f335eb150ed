"""The folder that NormStatisticsHook writes: `norm_statistics/` in the work directory.

- `record.json`: `version`, information on the run (`run`, `config`, `interval`, `processes`), and `layers`, each a
  :class:`RecordedNorm`.
- `steps.npy`: a row for each recorded step, with the fields `step` (int64, from 1), `activation`, `gradient` and
  `outliers`. `activation` and `gradient` (float32) have the channels of all layers, one layer after the other.
  `outliers` (int64) has the outlier steps so far of each layer, -1 if a layer has no filter.
- `snapshots.npy`: a row for each time that steps were written, of the first of these steps. Its fields are `step`,
  `mean` (of the inputs) and `running_var` (after the step), float32, channels as above.

Both are ordinary `.npy` files that grow: new rows are appended, then the header is updated. If the process is killed,
the rows counted by the header are valid.
"""
from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy

from mmunorm.utils import PreflightError

FOLDER = 'norm_statistics'
VERSION = 3
# The gradient statistic of a layer.
OFFLINE_GRADIENT = 'mean of gamma * dy * z'
ONLINE_GRADIENT = 'mean square of dy'

HEAD, STEPS, SNAPSHOTS = 'record.json', 'steps.npy', 'snapshots.npy'


class RecordError(PreflightError, ValueError):
    """A record cannot be read or continued."""


class RecordedNorm(NamedTuple):
    """One norm layer of a record: its name, its class, its number of channels and its gradient statistic.

    `gradient` is OFFLINE_GRADIENT for a norm with running statistics: the paper's `g` (Eq. 6-9). It is ONLINE_GRADIENT
    for any other norm, and for PRepBN, which blends such a norm in: the mean square of the gradient at the output.
    """
    name: str
    norm: str
    channels: int
    gradient: str


def row_dtypes(layers: Sequence[RecordedNorm]) -> tuple[np.dtype, np.dtype]:
    """The dtypes of a row of `steps.npy` and of `snapshots.npy`."""
    channels = ('<f4', (sum(layer.channels for layer in layers),))
    return (np.dtype([('step', '<i8'), ('activation', *channels), ('gradient', *channels),
                      ('outliers', '<i8', (len(layers),))]),
            np.dtype([('step', '<i8'), ('mean', *channels), ('running_var', *channels)]))


class NormRecordWriter:
    """Creates or continues a record.

    Args:
        folder: the record's folder. With `resume_step`, an existing one is continued, and later steps are dropped.
            Without it, an existing one is renamed to `*.old`.
        layers: the layers, in the order of their columns.
        info: information on the run, as JSON; written when the folder is created.
        resume_step: the last step to keep.

    Raises:
        RecordError: the folder to continue is not a record, or it has other layers or another `interval`.
    """

    def __init__(self, folder: str | Path, layers: Sequence[RecordedNorm], info: dict, resume_step: int = 0):
        self.folder = Path(folder)
        self.layers = list(layers)
        self.counts = {STEPS: 0, SNAPSHOTS: 0}
        if resume_step > 0 and self.folder.exists():
            self._resume(info, resume_step)
        else:
            self._create(info)

    def append(self, steps: np.ndarray, snapshot: np.ndarray) -> None:
        """Writes steps and a snapshot `(1,)`, both with their dtype of :func:`row_dtypes`."""
        for name, rows in ((STEPS, steps), (SNAPSHOTS, snapshot)):
            _write_rows(self.folder / name, self.counts[name], rows)
            self.counts[name] += len(rows)

    def _create(self, info: dict) -> None:
        # Created under another name, so that on a full disk an older record is not replaced by an incomplete one.
        new, old = (self.folder.with_name(f'{self.folder.name}.{end}') for end in ('new', 'old'))
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        head = dict(version=VERSION, **info, layers=[layer._asdict() for layer in self.layers])
        (new / HEAD).write_text(json.dumps(head, indent=1))
        for name, dtype in zip(self.counts, row_dtypes(self.layers), strict=True):
            np.save(new / name, np.empty(0, dtype))
        if self.folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.folder.rename(old)
        new.rename(self.folder)

    def _resume(self, info: dict, resume_step: int) -> None:
        record = NormRecord(self.folder)
        before, now = record.info.get('interval'), info.get('interval')
        if before != now:
            raise RecordError(f'{self.folder} records with interval={before}, and this run with '
                              f'interval={now}: keep the interval, or remove the record.')
        if record.layers != self.layers:
            raise RecordError(
                f'{self.folder} records other layers than this run has ({len(record.layers)} against '
                f'{len(self.layers)}, or other channels or norms): remove it to start a new record.')
        for name in self.counts:
            rows = np.load(self.folder / name, mmap_mode='r')
            self.counts[name] = int(rows['step'].searchsorted(resume_step, side='right'))
            _write_rows(self.folder / name, self.counts[name], rows[:0])


def _write_rows(path: Path, start: int, rows: np.ndarray) -> None:
    """Writes rows at row `start` of a `.npy` file and truncates the header there."""
    content = npy.header_data_from_array_1_0(rows)
    content['shape'] = (start + len(rows),)
    header = io.BytesIO()
    npy.write_array_header_1_0(header, content)  # numpy pads it, so its length does not depend on the count
    with path.open('r+b') as file:
        file.seek(header.tell() + start * rows.itemsize)
        file.write(rows.tobytes())
        file.flush()  # if the process is killed here, the old header and rows are valid
        file.seek(0)
        file.write(header.getvalue())


class NormRecord:
    """Reads a record, also while it is written; the statistics are read from disk lazily.

    Attributes:
        info (dict): information on the run.
        layers (list[RecordedNorm]): the layers.
        steps (numpy.ndarray): the recorded training steps `(T,)`, the first step of a run is 1.

    Raises:
        RecordError: the folder does not exist, is not a record, or is of another version.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        head = self.path / HEAD
        if not head.is_file():
            raise RecordError(f'there is no record {self.path}: train with '
                              "`custom_hooks=[dict(type='NormStatisticsHook')]`.")
        try:
            self.info = json.loads(head.read_text())
            self.layers = [RecordedNorm(**layer) for layer in self.info.pop('layers')]
            version = self.info['version']
            if version == VERSION:
                self._rows, self._snapshots = (np.load(self.path / name, mmap_mode='r') for name in (STEPS, SNAPSHOTS))
                if (self._rows.dtype, self._snapshots.dtype) != row_dtypes(self.layers):
                    raise ValueError(f'{STEPS} or {SNAPSHOTS} is of other layers than {HEAD}')
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
            raise RecordError(f'{self.path} is not a record of norm statistics.') from error
        if version != VERSION:
            raise RecordError(f'{self.path} has version {version} of the format, but this package reads version '
                              f'{VERSION}: remove it and record again.')
        self._starts = np.cumsum([0] + [layer.channels for layer in self.layers])
        self.steps = np.array(self._rows['step'])

    @property
    def norms(self) -> str:
        """The types of norms in the record."""
        return ', '.join(dict.fromkeys(layer.norm for layer in self.layers))

    def activation(self, layer: int | str, rows: slice = slice(None)) -> np.ndarray:
        """The activation statistics of a layer `(T, C)` float32; `rows` takes some of the recorded steps."""
        return np.array(self._rows['activation'][rows, self._columns(layer)])

    def gradient(self, layer: int | str, rows: slice = slice(None)) -> np.ndarray:
        """The gradient statistics of a layer `(T, C)` float32; NaN without a gradient."""
        return np.array(self._rows['gradient'][rows, self._columns(layer)])

    def outliers(self) -> np.ndarray:
        """Outlier steps so far, `(T, layers)` int64; -1 where a layer has no outlier filter."""
        return np.array(self._rows['outliers'])

    def mean(self, layer: int | str) -> tuple[np.ndarray, np.ndarray]:
        """The steps of the snapshots `(S,)`, and the means of the layer's input in them `(S, C)`."""
        return np.array(self._snapshots['step']), np.array(self._snapshots['mean'][:, self._columns(layer)])

    def running_var(self, layer: int | str) -> tuple[np.ndarray, np.ndarray]:
        """The steps of the snapshots `(S,)`, and the running variances after them `(S, C)`; NaN without any."""
        return np.array(self._snapshots['step']), np.array(self._snapshots['running_var'][:, self._columns(layer)])

    def index(self, layer: int | str) -> int:
        """The index of a layer. Raises a RecordError that lists the layers if the name is unknown."""
        if isinstance(layer, int):
            return layer
        names = [layer.name for layer in self.layers]
        if layer not in names:
            raise RecordError(f'{self.path} has no layer {layer!r}; it has {", ".join(names)}.')
        return names.index(layer)

    def _columns(self, layer: int | str) -> slice:
        return slice(*self._starts[self.index(layer):][:2])
