"""The folder that NormStatisticsHook writes: `norm_statistics/` in the work directory.

- `record.json`: `format`, `version`, what is known of the run (`run`, `config`, `interval`, `processes`), and `layers`.
  Each layer has `name`, `norm` (class), `channels` and `gradient` (see :class:`Layer`).
- `steps_LAST.npy`: a block of recorded steps up to training step LAST. Its fields are `step` (int64), `activation`,
  `gradient` and `outliers`. `activation` and `gradient` (float32) have the channels of all layers, one layer after the
  other. `outliers` (int64) has the outlier steps so far of each layer, -1 where a layer has no filter.
- `running_var_LAST.npy`: the running variances after that block, float32, channels as above.
- `mean_LAST.npy`: the means of the inputs in the first step of that block, float32, channels as above.

Every file appears whole or not at all. A process that is killed loses at most its last block.
"""
from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..utils import PreflightError, whole_file

FOLDER = 'norm_statistics'
FORMAT = 'mmunorm norm statistics'
VERSION = 2
# What `gradient` of a layer holds.
OFFLINE_GRADIENT = 'mean of gamma * dy * z'
ONLINE_GRADIENT = 'mean square of dy'

_HEAD = 'record.json'


class RecordError(PreflightError, ValueError):
    """A record cannot be read or continued."""


class Layer(NamedTuple):
    """One norm layer of a record.

    `gradient` says which statistic of the gradient is recorded. For a norm with running statistics, it is the paper's
    `g` (Eq. 6-9). For a norm without running statistics, it is the mean square of the gradient at the output. The
    same holds for PRepBN, which blends such a norm in.
    """
    name: str
    norm: str
    channels: int
    gradient: str


def step_dtype(layers: Sequence[Layer]) -> np.dtype:
    """The dtype of one recorded step; its `itemsize` is the number of bytes of a step on disk."""
    channels = sum(layer.channels for layer in layers)
    return np.dtype([('step', '<i8'), ('activation', '<f4', (channels,)), ('gradient', '<f4', (channels,)),
                     ('outliers', '<i8', (len(layers),))])


class RecordWriter:
    """Creates or continues a record.

    Args:
        folder: the record's folder. One that exists is continued: its steps after `resume_step` are dropped.
        layers: the layers, in the order of their columns.
        info: what is known of the run, as JSON; written when the folder is created.
        resume_step: the last step to keep. 0 means a new run; a record that is there is then renamed to `*.old`.

    Raises:
        RecordError: the folder to continue is not a record, or it has other layers or another `interval`.
    """

    def __init__(self, folder: str | Path, layers: Sequence[Layer], info: dict, resume_step: int = 0):
        self.folder = Path(folder)
        self.layers = list(layers)
        self.step_dtype = step_dtype(layers)
        if self.folder.exists() and resume_step > 0:
            self._continue(info, resume_step)
            return
        # Begun under another name: on a full disk, an older record must not be moved aside for a folder without a head.
        new = self.folder.with_name(f'{self.folder.name}.new')
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        head = dict(format=FORMAT, version=VERSION, **info, layers=[layer._asdict() for layer in self.layers])
        (new / _HEAD).write_text(json.dumps(head, indent=1))
        if self.folder.exists():
            old = self.folder.with_name(f'{self.folder.name}.old')
            shutil.rmtree(old, ignore_errors=True)
            self.folder.rename(old)
        new.rename(self.folder)

    def append(self, steps: np.ndarray, running_var: np.ndarray, mean: np.ndarray) -> None:
        """Writes a block: `steps` `(n,)` of `step_dtype`, and for all channels, float32, the running variances after
        them and the means in the first of them."""
        last = f'{steps["step"][-1]:010d}'
        # The steps first: variances without their steps would stay when a resumed run drops what came too late.
        self._put(f'steps_{last}.npy', steps)
        self._put(f'running_var_{last}.npy', running_var)
        self._put(f'mean_{last}.npy', mean)

    def _put(self, name: str, array: np.ndarray) -> None:
        content = io.BytesIO()  # on a full disk, numpy's own write does not say why it fails
        np.save(content, array)
        with whole_file(self.folder / name) as part:
            part.write_bytes(content.getbuffer())

    def _continue(self, info: dict, resume_step: int) -> None:
        record = Record(self.folder)
        before, now = record.info.get('interval'), info.get('interval')
        if before != now:
            raise RecordError(f'{self.folder} records with interval={before}, and this run with '
                              f'interval={now}: keep the interval, or move the record away.')
        if record.layers != self.layers:
            raise RecordError(
                f'{self.folder} records other layers than this run has ({len(record.layers)} against '
                f'{len(self.layers)}, or other channels or norms): move it away to record anew.')
        for path in _blocks(self.folder, 'steps'):
            steps = np.load(path)
            kept = steps[steps['step'] <= resume_step]
            if len(kept) == len(steps):
                continue
            mean = _beside(path, 'mean')
            if len(kept):  # the variances belong to a later step, so they are removed
                shorter = f'{kept["step"][-1]:010d}.npy'
                self._put(f'steps_{shorter}', kept)
                if mean.exists():
                    mean.rename(self.folder / f'mean_{shorter}')
            path.unlink()
            mean.unlink(missing_ok=True)
            _beside(path, 'running_var').unlink(missing_ok=True)


class Record:
    """Reads a record; the statistics stay on disk until they are asked for.

    Args:
        folder: what NormStatisticsHook wrote. A record that is still being written can be read too.

    Attributes:
        info (dict): what is known of the run.
        layers (list[Layer]): the layers.
        steps (numpy.ndarray): the recorded training steps `(T,)`, the first step of a run is 1.

    Raises:
        RecordError: there is no such folder, or it is no record.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        head = self.path / _HEAD
        if not head.is_file():
            raise RecordError(f'there is no record {self.path}: train with '
                              "`custom_hooks=[dict(type='NormStatisticsHook')]`.")
        try:
            self.info = json.loads(head.read_text())
            if self.info['format'] != FORMAT:
                raise ValueError('another format')
            version = self.info['version']
            self.layers = [Layer(**layer) for layer in self.info.pop('layers')] if version <= VERSION else []
            self._blocks = [np.load(path, mmap_mode='r') for path in _blocks(self.path, 'steps')]
        except (ValueError, KeyError, TypeError, EOFError) as error:
            raise RecordError(f'{self.path} is no record of norm statistics.') from error
        if version > VERSION:
            raise RecordError(f'{self.path} has version {version} of the format; this package reads up to {VERSION}.')
        self._names = {layer.name: i for i, layer in enumerate(self.layers)}
        self._starts = np.cumsum([0] + [layer.channels for layer in self.layers])
        self.steps = _join([block['step'] for block in self._blocks], np.empty(0, np.int64))

    def activation(self, layer: int | str, rows: slice = slice(None)) -> np.ndarray:
        """The activation statistics of a layer `(T, C)` float32; `rows` takes some of the recorded steps."""
        return self._columns('activation', layer, rows)

    def gradient(self, layer: int | str, rows: slice = slice(None)) -> np.ndarray:
        """The gradient statistics of a layer `(T, C)` float32; NaN where no gradient came."""
        return self._columns('gradient', layer, rows)

    def outliers(self) -> np.ndarray:
        """Outlier steps so far, `(T, layers)` int64; -1 where a layer has no outlier filter."""
        return _join([block['outliers'] for block in self._blocks], np.empty((0, len(self.layers)), np.int64))

    def running_var(self, layer: int | str) -> tuple[np.ndarray, np.ndarray]:
        """Steps `(S,)` and running variances `(S, C)` at the end of each block; NaN for a norm without any."""
        columns = self._slice(layer)
        paths = _blocks(self.path, 'running_var')
        return (np.array([int(path.stem.rpartition('_')[2]) for path in paths], np.int64),
                _join([np.load(path, mmap_mode='r')[None, columns] for path in paths],
                      np.empty((0, columns.stop - columns.start), np.float32)))

    def mean(self, layer: int | str) -> tuple[np.ndarray, np.ndarray]:
        """Steps `(S,)`, the first of each block, and the means of the layer's input in them `(S, C)`.

        Older records have none.
        """
        columns = self._slice(layer)
        found = [(block['step'][0], path) for block in self._blocks
                 if (path := self.path / f'mean_{block["step"][-1]:010d}.npy').exists()]
        return (np.array([first for first, _ in found], np.int64),
                _join([np.load(path, mmap_mode='r')[None, columns] for _, path in found],
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

    def _slice(self, layer: int | str) -> slice:
        i = self.index(layer)
        return slice(int(self._starts[i]), int(self._starts[i + 1]))

    def _columns(self, field: str, layer: int | str, rows: slice) -> np.ndarray:
        columns = self._slice(layer)
        start, stop, _ = rows.indices(len(self.steps))
        parts, offset = [], 0
        for block in self._blocks:
            first, last = max(start - offset, 0), min(stop - offset, len(block))
            if first < last:
                parts.append(block[field][first:last, columns])
            offset += len(block)
        return _join(parts, np.empty((0, columns.stop - columns.start), np.float32))


def _blocks(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f'{kind}_*.npy'))


def _beside(steps: Path, kind: str) -> Path:
    return steps.with_name(steps.name.replace('steps', kind))


def _join(parts: list[np.ndarray], empty: np.ndarray) -> np.ndarray:
    return np.concatenate(parts) if parts else empty
