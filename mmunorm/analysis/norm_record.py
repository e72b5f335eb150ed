"""The folder that NormStatisticsHook writes: `norm_statistics/` in the work directory.

- `record.json`: `version`, what is known of the run (`run`, `config`, `interval`, `processes`), and `layers`, each as a
  :class:`RecordedNorm`.
- `steps.npy`: a row for each recorded step, with the fields `step` (int64, from 1), `activation`, `gradient` and
  `outliers`. `activation` and `gradient` (float32) have the channels of all layers, one layer after the other.
  `outliers` (int64) has the outlier steps so far of each layer, -1 where a layer has no filter.
- `snapshots.npy`: a row for each time that steps were written, of the first of these steps. Its fields are `step`,
  `mean` (of the inputs) and `running_var` (after the step), float32, channels as above.

Both are ordinary `.npy` files that grow: new rows go to the end, then the header counts them. A process that is killed
leaves the rows that the header counts.
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

from ..utils import PreflightError

FOLDER = 'norm_statistics'
VERSION = 3
# What `gradient` of a layer holds.
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
        folder: the record's folder. With `resume_step`, one that exists is continued, and later steps are dropped.
            Without it, one that exists is renamed to `*.old`.
        layers: the layers, in the order of their columns.
        info: what is known of the run, as JSON; written when the folder is created.
        resume_step: the last step to keep.

    Raises:
        RecordError: the folder to continue is not a record, or it has other layers or another `interval`.
    """

    def __init__(self, folder: str | Path, layers: Sequence[RecordedNorm], info: dict, resume_step: int = 0):
        self.folder = Path(folder)
        self.layers = list(layers)
        self.counts = {STEPS: 0, SNAPSHOTS: 0}
        if resume_step > 0 and self.folder.exists():
            self._continue(info, resume_step)
        else:
            self._begin(info)

    def append(self, steps: np.ndarray, snapshot: np.ndarray) -> None:
        """Writes steps and a snapshot `(1,)`, both with their dtype of :func:`row_dtypes`."""
        for name, rows in ((STEPS, steps), (SNAPSHOTS, snapshot)):
            _put_rows(self.folder / name, self.counts[name], rows)
            self.counts[name] += len(rows)

    def _begin(self, info: dict) -> None:
        # Begun under another name: on a full disk, an older record must not be moved aside for a folder without a head.
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

    def _continue(self, info: dict, resume_step: int) -> None:
        record = NormRecord(self.folder)
        before, now = record.info.get('interval'), info.get('interval')
        if before != now:
            raise RecordError(f'{self.folder} records with interval={before}, and this run with '
                              f'interval={now}: keep the interval, or move the record away.')
        if record.layers != self.layers:
            raise RecordError(
                f'{self.folder} records other layers than this run has ({len(record.layers)} against '
                f'{len(self.layers)}, or other channels or norms): move it away to record anew.')
        for name in self.counts:
            rows = np.load(self.folder / name, mmap_mode='r')
            self.counts[name] = int(rows['step'].searchsorted(resume_step, side='right'))
            _put_rows(self.folder / name, self.counts[name], rows[:0])


def _put_rows(path: Path, start: int, rows: np.ndarray) -> None:
    """Puts rows at row `start` of a `.npy` file. The header then ends there: what came after no longer counts."""
    content = npy.header_data_from_array_1_0(rows)
    content['shape'] = (start + len(rows),)
    header = io.BytesIO()
    npy.write_array_header_1_0(header, content)  # numpy leaves room: it is as long for any other count
    with path.open('r+b') as file:
        file.seek(header.tell() + start * rows.itemsize)
        file.write(rows.tobytes())
        file.flush()  # a process that is killed here leaves the old header, and so the old rows
        file.seek(0)
        file.write(header.getvalue())


class NormRecord:
    """Reads a record, also one that is still being written; the statistics stay on disk until they are asked for.

    Attributes:
        info (dict): what is known of the run.
        layers (list[RecordedNorm]): the layers.
        steps (numpy.ndarray): the recorded training steps `(T,)`, the first step of a run is 1.

    Raises:
        RecordError: there is no such folder, or it is no record, or one of another version.
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
            raise RecordError(f'{self.path} is no record of norm statistics.') from error
        if version != VERSION:
            raise RecordError(f'{self.path} has version {version} of the format, and this package reads version '
                              f'{VERSION}: move it away, and record anew.')
        self._starts = np.cumsum([0] + [layer.channels for layer in self.layers])
        self.steps = np.array(self._rows['step'])

    @property
    def norms(self) -> str:
        """The kinds of norms in the record."""
        return ', '.join(dict.fromkeys(layer.norm for layer in self.layers))

    def activation(self, layer: int | str, rows: slice = slice(None)) -> np.ndarray:
        """The activation statistics of a layer `(T, C)` float32; `rows` takes some of the recorded steps."""
        return np.array(self._rows['activation'][rows, self._columns(layer)])

    def gradient(self, layer: int | str, rows: slice = slice(None)) -> np.ndarray:
        """The gradient statistics of a layer `(T, C)` float32; NaN where no gradient came."""
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
        """The position of a layer. Raises a RecordError that names the layers if there is none of this name."""
        if isinstance(layer, int):
            return layer
        names = [each.name for each in self.layers]
        if layer not in names:
            raise RecordError(f'{self.path} has no layer {layer!r}; it has {", ".join(names)}.')
        return names.index(layer)

    def _columns(self, layer: int | str) -> slice:
        return slice(*self._starts[self.index(layer):][:2])
