"""Measures of a record, and their numbers as CSV."""
from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from mmunorm.utils import whole_file

from .norm_record import NormRecord, RecordError
from .normality import pnac, spans

FIELDS = ('activation', 'gradient')
# The default number of recorded steps in a span. The paper does not state it. The test is sharper with more steps.
DEFAULT_SPAN = 100


class PNACOverTraining(NamedTuple):
    """PNAC of L layers in S spans of `span` recorded steps; `left_out` steps before the last span are in no span."""
    first: np.ndarray  # training step of each span `(S,)`
    last: np.ndarray
    layers: list[str]
    results: dict[str, np.ndarray]  # `(S, L, 4)` for 'activation' and 'gradient', each row a PNAC
    span: int
    left_out: int

    def percent(self, field: str) -> np.ndarray:
        """PNAC in percent `(S, L)` of 'activation' or 'gradient'; NaN where no channel could be tested."""
        return self.results[field][..., 0]

    def mean(self, field: str) -> np.ndarray:
        """The mean PNAC over the layers `(S,)`; NaN where no layer has a PNAC."""
        return finite_mean(self.percent(field), axis=1)

    def rows(self, run: str) -> Iterable[tuple]:
        """Rows for a CSV file under :data:`PNAC_HEADER`."""
        for field in FIELDS:
            for i, j in np.ndindex(len(self.first), len(self.layers)):
                yield run, field, self.layers[j], self.first[i], self.last[i], *self.results[field][i, j]

    def notes(self) -> list[str]:
        """Sentences on which steps were tested, and what could not be tested."""
        count = len(self.first)
        rest = f'; the {self.left_out} before the last span are in none' if self.left_out else ''
        found = [f'{count} {"span" if count == 1 else "spans"} of {self.span} recorded steps{rest}.']
        for field in FIELDS:
            untested = np.isnan(self.percent(field)).all(axis=0)
            if untested.all():
                found.append(f'No layer has {field} statistics that could be tested.')
            elif untested.any():
                names = ', '.join(np.array(self.layers)[untested])
                found.append(f'These layers have no {field} statistics that could be tested: {names}.')
            if constant := int(self.results[field][..., 2].sum()):
                found.append(f'Left out of the {field} PNAC: {constant} sequences (a channel over a span) '
                             'that did not change.')
        return found


PNAC_HEADER = ('run', 'statistic', 'layer', 'first_step', 'last_step', 'pnac_percent', 'channels',
               'constant', 'steps')


def measure_pnac(record: NormRecord, span: int | None = None) -> PNACOverTraining:
    """PNAC of all layers of a record, over training; a `span` of None is 100 recorded steps, or all if there are fewer.

    Raises:
        RecordError: the record or the span is too short.
    """
    count = len(record.steps)
    try:
        pieces = spans(count, min(DEFAULT_SPAN, count) if span is None else span)
    except ValueError as error:
        raise RecordError(f'{record.path}: {error}.') from error
    span = pieces[0].stop
    results = {field: np.empty((len(pieces), len(record.layers), 4)) for field in FIELDS}
    work = [(field, *index) for field in FIELDS for index in np.ndindex(len(pieces), len(record.layers))]
    for field, i, layer in tqdm(work, desc='PNAC', unit='test', disable=None):
        results[field][i, layer] = pnac(getattr(record, field)(layer, pieces[i]))
    return PNACOverTraining(
        np.array([record.steps[piece][0] for piece in pieces]),
        np.array([record.steps[piece][-1] for piece in pieces]),
        [layer.name for layer in record.layers], results, span, count - span * len(pieces))


def finite_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of the finite values along an axis; NaN where there are none."""
    return np.ma.masked_invalid(values).mean(axis=axis).filled(np.nan)


class ChannelHistory(NamedTuple):
    """One channel's statistic over training with its means over the last M steps, each `(T,)`."""
    layer: str
    channel: int
    field: str
    steps: np.ndarray
    values: np.ndarray
    gm: np.ndarray
    am: np.ndarray


def channel_history(record: NormRecord, layer: int | str, channel: int, field: str, window: int,
                    rows: slice = slice(None)) -> ChannelHistory:
    """The history of one channel (Fig. 4).

    The means are of `window`, M, recorded steps, and NaN for the first M - 1. The geometric mean is also NaN where
    the last M steps have a negative value.

    Args:
        field: 'activation' or 'gradient'.
        rows: which of the recorded steps to take. The means also use steps before these.

    Raises:
        RecordError: there is no such layer or channel, or the record is shorter than the window.
    """
    values = getattr(record, field)(layer).astype(float)
    name = _check_channel(record, layer, channel)
    if not 1 <= window <= len(values):
        raise RecordError(f'{record.path}: window={window}: must be from 1 to the number of steps, {len(values)}.')
    values = values[:, channel]
    windows = np.lib.stride_tricks.sliding_window_view(values, window)
    with np.errstate(invalid='ignore', divide='ignore'):
        means = np.exp(np.log(windows).mean(axis=1)), windows.mean(axis=1)
    gm, am = (np.pad(mean, (window - 1, 0), constant_values=np.nan)[rows] for mean in means)
    return ChannelHistory(name, channel, field, record.steps[rows], values[rows], gm, am)


def _check_channel(record: NormRecord, layer: int | str, channel: int) -> str:
    """The name of a layer; a RecordError if it has no such channel."""
    norm = record.layers[record.index(layer)]
    if not 0 <= channel < norm.channels:
        raise RecordError(f'{record.path}: {norm.name} has channels 0 to {norm.channels - 1}, not {channel}.')
    return norm.name


class MeanShares(NamedTuple):
    """The share of the mean in a norm's input, `mean(x)^2 / mean(x^2)` over tokens; NaN if a layer did not run."""
    steps: np.ndarray  # in which means were recorded `(S,)`
    layers: list[str]
    all_channels: np.ndarray  # both squares summed over the channels `(S, L)`
    highest_channel: np.ndarray  # the highest share of a single channel `(S, L)`


def measure_mean_shares(record: NormRecord) -> MeanShares | None:
    """The shares of a record; None if no mean was recorded."""
    steps, _ = record.mean(0)
    if not len(steps):
        return None
    rows = record.steps.searchsorted(steps)
    shares = []
    for layer in range(len(record.layers)):
        means = record.mean(layer)[1].astype(float)**2
        squares = record.activation(layer)[rows].astype(float)
        channels = np.divide(means, squares, out=np.zeros_like(means), where=squares != 0)  # NaN stays
        shares.append((means.sum(1) / np.where(squares.sum(1) == 0, 1, squares.sum(1)), channels.max(1)))
    return MeanShares(steps, [layer.name for layer in record.layers], *np.array(shares).transpose(1, 2, 0))


class Outliers(NamedTuple):
    """Accumulated outlier steps: names of the L layers with a filter, training steps `(P,)` and counts `(P, L)`."""
    layers: list[str]
    steps: np.ndarray
    counts: np.ndarray


def accumulated_outliers(record: NormRecord, points: int = 4) -> Outliers:
    """Outlier steps of each layer up to several points of training, at equal distances; the last is its end (Fig. 5).

    Raises:
        RecordError: no layer has an outlier filter.
    """
    counts = record.outliers()
    filtered = np.flatnonzero(counts[-1] >= 0)
    if not len(filtered):
        norms = sorted({layer.norm for layer in record.layers})
        raise RecordError(f'{record.path} has no layer with an outlier filter; its norms are {", ".join(norms)}.')
    rows = np.unique(np.linspace(0, len(counts), points + 1)[1:].round().astype(int) - 1)
    rows = rows[rows >= 0]
    return Outliers([record.layers[i].name for i in filtered], record.steps[rows], counts[rows][:, filtered])


class Spread(NamedTuple):
    """The fluctuation between batches of each layer: standard deviation of ln s and outlier steps, `(L,)`, or NaN."""
    layers: list[str]
    spread: np.ndarray
    outliers: np.ndarray


def batch_spread(record: NormRecord, last: int) -> Spread:
    """The fluctuation of each layer's activation statistic s between batches, over the last recorded steps.

    The spread is the median over channels of `sqrt(mean((ln s_t - ln s_{t-1})^2) / 2)`. For independent batches it is
    the standard deviation of ln s, and a slow trend has little effect. 0.1 is about 10 % of s.

    Args:
        record: a record of every step.
        last: the number of recorded steps to use, at least 2.

    Raises:
        RecordError: the record is shorter, or lacks steps.
    """
    if not 2 <= last <= len(record.steps):
        raise RecordError(f'{record.path} has {len(record.steps)} recorded steps: the span must be from 2 to that, got '
                          f'{last}.')
    if record.steps[-1] - record.steps[-last] != last - 1:
        raise RecordError(f'{record.path} does not have every step: record with interval=1.')
    spreads = []
    for layer in range(len(record.layers)):
        with np.errstate(divide='ignore', invalid='ignore'):
            changes = np.diff(np.log(record.activation(layer, slice(-last, None)).astype(float)), axis=0)
        spreads.append(np.median(np.sqrt(np.square(changes).mean(axis=0) / 2)))
    counts = record.outliers()
    before = counts[-last - 1] if last < len(counts) else np.minimum(counts[0], 0)
    return Spread([layer.name for layer in record.layers], np.array(spreads),
                  np.where(counts[-1] < 0, np.nan, counts[-1] - before))


def evenly_spaced(items: Sequence, most: int) -> list[int]:
    """Evenly spaced indices of at most `most` items, including the first and the last."""
    return np.unique(np.linspace(0, len(items) - 1, min(len(items), most)).round().astype(int)).tolist()


def peak_channel(record: NormRecord, layer: int | str) -> int:
    """The channel with the highest peak of its activation statistic relative to its median; the first if all are 0."""
    values = record.activation(layer)
    values = values[np.isfinite(values).all(axis=1)]
    if not len(values):
        return 0
    median = np.median(values, axis=0)
    return int(np.divide(values.max(axis=0), median, out=np.zeros_like(median), where=median > 0).argmax())


def around_peak(record: NormRecord, layer: int | str, channel: int, count: int = 100) -> slice:
    """`count` recorded steps around the highest activation statistic of a channel; all if there are fewer."""
    _check_channel(record, layer, channel)
    values = record.activation(layer)[:, channel]
    top = int(np.where(np.isfinite(values), values, -np.inf).argmax())
    first = max(0, min(top - count // 2, len(values) - count))
    return slice(first, first + count)


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence]) -> None:
    """Writes rows under a header. Floats get at most 7 significant digits."""
    with whole_file(path) as part, part.open('w', newline='') as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for row in rows:
            writer.writerow([f'{value:.7g}' if isinstance(value, (float, np.floating)) else value
                             for value in row])
