"""The file that NormStatisticsHook writes: one `.npy` array after the other, each as `numpy.save` writes it.

1. a 0-d string, JSON: `format`, `version` and what is known of the run (`run`, `config`, `interval`, ...);
2. the table of layers: `name`, `norm` (class), `channels`, `gradient` (see :class:`Layer`);
3. blocks, in the order of training, of two kinds that their fields tell apart:
   - steps: `step` (int64), `activation` and `gradient` (float32, the channels of all layers one layer after
     the other), `outliers` (int64, outlier steps so far of each layer, -1 where a layer has no filter);
   - a snapshot of one row at the end of each block of steps: `step` and `running_var` (float32, as above).

The file only grows, by whole blocks, so a process that is killed loses no block before its last; what
is left of that one is ignored, and overwritten when the run resumes. See docs/analysis.md.
"""
from __future__ import annotations

import io
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy

FILENAME = 'norm_statistics.npy'
FORMAT = 'mmunorm norm statistics'
VERSION = 1
# What the column `gradient` of a layer holds.
OFFLINE_GRADIENT = 'mean of gamma * dy * z'
ONLINE_GRADIENT = 'mean square of dy'


class RecordError(ValueError):
    """A record cannot be read or continued, for a reason that one sentence explains."""


class Layer(NamedTuple):
    """One norm layer of a record.

    `gradient` says which statistic of the gradient is recorded: the paper's `g` (Eq. 6-9) of a norm with
    running statistics, or the mean square of the gradient at the output of a norm that has none (or blends
    one in, as PRepBN).
    """
    name: str
    norm: str
    channels: int
    gradient: str


class _Block(NamedTuple):
    offset: int  # of the header
    data: int  # of the first row
    rows: int
    dtype: np.dtype


def step_dtype(layers: Sequence[Layer]) -> np.dtype:
    """One recorded step: `itemsize` is the bytes that it takes in the file."""
    channels = sum(layer.channels for layer in layers)
    return np.dtype([('step', '<i8'), ('activation', '<f4', (channels,)), ('gradient', '<f4', (channels,)),
                     ('outliers', '<i8', (len(layers),))])


def snapshot_dtype(layers: Sequence[Layer]) -> np.dtype:
    """One snapshot of the running variances."""
    return np.dtype([('step', '<i8'), ('running_var', '<f4', (sum(layer.channels for layer in layers),))])


class RecordWriter:
    """Creates or continues a record.

    Args:
        path: the file. One that exists is continued: its steps after `resume_step` are dropped.
        layers: the layers, in the order of their columns.
        info: what is known of the run, as JSON; written when the file is created.
        resume_step: the last step to keep. With 0 the run is a new one, and a record that is there is
            renamed to `*.old.npy`.

    Raises:
        RecordError: the file to continue is no record, or one of other layers or another `interval`.
    """

    def __init__(self, path: str | Path, layers: Sequence[Layer], info: dict, resume_step: int = 0):
        self.path = Path(path)
        self.layers = list(layers)
        self.step_dtype, self.snapshot_dtype = step_dtype(layers), snapshot_dtype(layers)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and resume_step > 0:
            self._continue(info, resume_step)
            return
        if self.path.exists():
            os.replace(self.path, self.path.with_suffix('.old.npy'))
        table = np.array(self.layers, dtype=_table_dtype(self.layers))
        head = json.dumps(dict(format=FORMAT, version=VERSION, **info))
        self._append(np.array(head), table)

    def append(self, steps: np.ndarray, snapshot: np.ndarray) -> None:
        """Writes a block: `steps` `(n,)` of `step_dtype` and `snapshot` `(1,)` of `snapshot_dtype`."""
        self._append(steps, snapshot)

    def _append(self, *arrays: np.ndarray) -> None:
        buffer = io.BytesIO()
        for array in arrays:
            np.save(buffer, array, allow_pickle=False)
        with open(self.path, 'ab') as file:
            file.write(buffer.getbuffer())

    def _continue(self, info: dict, resume_step: int) -> None:
        record = Record(self.path)
        before, now = record.info.get('interval'), info.get('interval')
        if before != now:
            raise RecordError(f'{self.path} records with interval={before}, and this run with '
                              f'interval={now}: keep the interval, or move the record away.')
        if record.layers != self.layers:
            raise RecordError(
                f'{self.path} records other layers than this run has ({len(record.layers)} against '
                f'{len(self.layers)}, or other channels or norms): move it away to record anew.')
        end = record.end
        for block in record.blocks:
            kept = int((record.rows(block)['step'] <= resume_step).sum())
            if kept == block.rows:
                continue
            end = block.offset
            if kept:
                header = _header(block.dtype, kept)
                # numpy pads a header so that the number of rows fits in whatever it is.
                assert len(header) == block.data - block.offset
                with open(self.path, 'r+b') as file:
                    file.seek(block.offset)
                    file.write(header)
                end = block.data + kept * block.dtype.itemsize
            break
        record.close()
        os.truncate(self.path, end)


class Record:
    """Reads a record; the statistics stay in the file until they are asked for.

    Args:
        path: the file that NormStatisticsHook wrote. One that is being written may be read.

    Attributes:
        info (dict): what is known of the run.
        layers (list[Layer]): the layers.
        steps (numpy.ndarray): the recorded training steps `(T,)`, the first step of a run is 1.

    Raises:
        RecordError: there is no such file, or it is no record.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise RecordError(f'there is no record {self.path}: train with '
                              "`custom_hooks=[dict(type='NormStatisticsHook')]`.")
        with open(self.path, 'rb') as file:
            size = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
            try:
                self.info = json.loads(str(np.load(file)))
                if self.info.get('format') != FORMAT:
                    raise ValueError('another format')
                if self.info['version'] > VERSION:
                    raise RecordError(f'{self.path} has version {self.info["version"]} of the format; '
                                      f'this package reads up to {VERSION}.')
                self.layers = [Layer(*row) for row in np.load(file).tolist()]
            except (ValueError, EOFError, TypeError, AttributeError) as error:
                if isinstance(error, RecordError):
                    raise
                raise RecordError(f'{self.path} is no record of norm statistics.') from error
            self.end = file.tell()
            self.blocks = self._scan(file, size)
        self._names = {layer.name: i for i, layer in enumerate(self.layers)}
        self._starts = np.cumsum([0] + [layer.channels for layer in self.layers])
        self._step_blocks = [self.rows(block) for block in self.blocks if 'activation' in block.dtype.names]
        self.steps = _join([block['step'] for block in self._step_blocks], np.empty(0, np.int64))

    def _scan(self, file, size: int) -> list[_Block]:
        """The whole blocks, by their headers alone; `end` is where the last of them ends."""
        blocks = []
        while True:
            offset = self.end
            file.seek(offset)
            try:
                read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
                (rows,), _, dtype = read[npy.read_magic(file)](file)
            except (ValueError, KeyError, EOFError):
                return blocks
            block = _Block(offset, file.tell(), rows, dtype)
            end = block.data + rows * dtype.itemsize
            if end > size:
                return blocks
            blocks.append(block)
            self.end = end

    def rows(self, block: _Block) -> np.ndarray:
        """The rows of a block, as a view into the file."""
        return np.ndarray((block.rows,), block.dtype, buffer=self._map, offset=block.data)

    def activation(self, layer: int | str, rows: slice = slice(None)) -> np.ndarray:
        """The activation statistics of a layer `(T, C)` float32; `rows` takes some of the recorded steps."""
        return self._columns('activation', layer, rows)

    def gradient(self, layer: int | str, rows: slice = slice(None)) -> np.ndarray:
        """The gradient statistics of a layer `(T, C)` float32; NaN where no gradient came."""
        return self._columns('gradient', layer, rows)

    def outliers(self) -> np.ndarray:
        """Outlier steps so far, `(T, layers)` int64; -1 where a layer has no outlier filter."""
        return _join([block['outliers'] for block in self._step_blocks],
                     np.empty((0, len(self.layers)), np.int64))

    def running_var(self, layer: int | str) -> tuple[np.ndarray, np.ndarray]:
        """Steps `(S,)` and running variances `(S, C)` at the end of each block; NaN without."""
        columns = self._slice(layer)
        blocks = [self.rows(block) for block in self.blocks if 'running_var' in block.dtype.names]
        return (_join([block['step'] for block in blocks], np.empty(0, np.int64)),
                _join([block['running_var'][:, columns] for block in blocks],
                      np.empty((0, columns.stop - columns.start), np.float32)))

    def index(self, layer: int | str) -> int:
        """The position of a layer, by its name.

        Raises:
            RecordError: there is no such layer; the message names those that there are.
        """
        if isinstance(layer, int):
            return layer
        if layer not in self._names:
            raise RecordError(f'{self.path} has no layer {layer!r}; it has {", ".join(self._names)}.')
        return self._names[layer]

    def close(self) -> None:
        """Lets go of the file."""
        self._step_blocks = []
        if self._map is not None:
            self._map.close()

    def _slice(self, layer: int | str) -> slice:
        i = self.index(layer)
        return slice(int(self._starts[i]), int(self._starts[i + 1]))

    def _columns(self, field: str, layer: int | str, rows: slice) -> np.ndarray:
        columns = self._slice(layer)
        start, stop, _ = rows.indices(len(self.steps))
        parts, offset = [], 0
        for block in self._step_blocks:
            first, last = max(start - offset, 0), min(stop - offset, len(block))
            if first < last:
                parts.append(block[field][first:last, columns])
            offset += len(block)
        return _join(parts, np.empty((0, columns.stop - columns.start), np.float32))


def _join(parts: list[np.ndarray], empty: np.ndarray) -> np.ndarray:
    # A copy, so that nothing points into a file that may be closed.
    return np.concatenate(parts) if parts else empty


def _table_dtype(layers: Sequence[Layer]) -> np.dtype:
    def text(field: str) -> str:
        return f'<U{max((len(getattr(layer, field)) for layer in layers), default=1)}'

    return np.dtype([('name', text('name')), ('norm', text('norm')), ('channels', '<i8'),
                     ('gradient', text('gradient'))])


def _header(dtype: np.dtype, rows: int) -> bytes:
    buffer = io.BytesIO()
    npy.write_array_header_1_0(
        buffer, dict(descr=npy.dtype_to_descr(dtype), fortran_order=False, shape=(rows,)))
    return buffer.getvalue()
