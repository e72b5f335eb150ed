"""PNAC: the percentage of channels whose statistics fluctuate like normal noise (Eq. 15)."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

# The test's kurtosis part is reliable from here on.
MIN_STEPS = 20
SIGNIFICANCE = 0.05


class PNAC(NamedTuple):
    """Percentage of normal activation (or gradient) statistic channels of one layer.

    Attributes:
        percent (float): percentage of the tested channels whose sequence passes for normal. NaN if no channel
            was tested, or if fewer than 20 steps are finite (a frozen layer has no gradient).
        channels (int): how many channels were tested.
        constant (int): how many channels were not tested, because their statistic did not change.
        steps (int): how many steps were tested. Steps with a value that is not finite are left out.
    """
    percent: float
    channels: int
    constant: int
    steps: int


def pnac(statistics: np.ndarray) -> PNAC:
    """PNAC of one layer over a span of steps (Eq. 15), from its statistics `(T, C)`.

    Each channel's sequence of statistics goes through D'Agostino and Pearson's test of normality
    (:func:`scipy.stats.normaltest`). PNAC is the percentage of channels with p > 0.05. A high PNAC means mild
    fluctuation. A trend within the span counts as fluctuation, so spans should be much shorter than training.
    """
    from scipy.stats import normaltest  # imported here, so that runs without a record need not wait for it
    statistics = np.asarray(statistics, dtype=np.float64)
    # After an overflow of mixed precision, a whole step is useless.
    finite = statistics[np.isfinite(statistics).all(axis=1)]
    if len(finite) < MIN_STEPS:
        return PNAC(float('nan'), 0, 0, len(finite))
    # Changes of the size of float32 rounding are not a fluctuation either.
    rounding = 4 * np.finfo(np.float32).eps * np.abs(finite).max(axis=0)
    varies = np.ptp(finite, axis=0) > rounding
    percent = float('nan')
    if varies.any():
        percent = 100 * float(np.mean(normaltest(finite[:, varies]).pvalue > SIGNIFICANCE))
    return PNAC(percent, int(varies.sum()), int((~varies).sum()), len(finite))


def spans(steps: int, span: int) -> list[slice]:
    """Splits the recorded steps into spans of `span` steps each.

    The first span starts at the first step, the last span ends at the last step. Up to `span - 1` steps before the last
    span are in no span. A single span is at the end.

    Raises:
        ValueError: there are fewer steps than one span, or a span is too short for the test.
    """
    if span < MIN_STEPS:
        raise ValueError(f'span={span}: the test of normality needs at least {MIN_STEPS} steps')
    if steps < span:
        raise ValueError(f'{steps} steps are recorded, and a span has {span}')
    starts = [*range(0, steps - 2 * span + 1, span), steps - span]
    return [slice(start, start + span) for start in starts]


def density(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Kernel density estimate of values `(N,)` at the points `grid` `(G,)`, with Scott's bandwidth (Fig. 7).

    NaN is left out. The density `(G,)` is NaN if there are fewer than two values, or if all are equal.
    """
    from scipy.stats import gaussian_kde
    values = values[np.isfinite(values)]
    if len(values) < 2 or np.ptp(values) == 0:
        return np.full(len(grid), np.nan)
    return gaussian_kde(values)(grid)
