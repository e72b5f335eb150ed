"""PNAC: how many channels have statistics that fluctuate as mildly as normal noise (Eq. 15)."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

# The test's kurtosis part is reliable from here on.
LEAST_STEPS = 20
SIGNIFICANCE = 0.05


class PNAC(NamedTuple):
    """Percentage of normal activation (or gradient) statistic channels of one layer.

    Attributes:
        percent (float): of the tested channels, those whose sequence passes for normal; NaN if none
            was, or if fewer than 20 steps are finite (a frozen layer has no gradient).
        channels (int): how many were tested.
        constant (int): how many were not, because their statistic did not change.
        steps (int): steps that the test saw; those with a value that is not finite are left out.
    """
    percent: float
    channels: int
    constant: int
    steps: int


def pnac(statistics: np.ndarray, significance: float = SIGNIFICANCE) -> PNAC:
    """PNAC of one layer over a span of steps (Eq. 15).

    Each channel's sequence of statistics goes through D'Agostino and Pearson's test of normality
    (:func:`scipy.stats.normaltest`); PNAC is the percentage of channels with p > `significance`. High is mild
    fluctuation. A trend within the span counts as fluctuation, so spans should be short against training.

    Args:
        statistics: `(T, C)`, one row a step.
        significance: of the test. Defaults to 0.05.

    Raises:
        ValueError: the span has fewer than 20 steps.
    """
    from scipy.stats import normaltest  # which nobody waits for who records nothing
    statistics = np.asarray(statistics, dtype=np.float64)
    if len(statistics) < LEAST_STEPS:
        raise ValueError(f'statistics: the test of normality needs at least {LEAST_STEPS} steps, got '
                         f'{len(statistics)}')
    # After an overflow of mixed precision a whole step is worthless.
    finite = statistics[np.isfinite(statistics).all(axis=1)]
    if len(finite) < LEAST_STEPS:
        return PNAC(float('nan'), 0, 0, len(finite))
    # Steps of float32 rounding are no fluctuation either.
    rounding = 4 * np.finfo(np.float32).eps * np.abs(finite).max(axis=0)
    varies = np.ptp(finite, axis=0) > rounding
    tested = finite[:, varies]
    percent = float('nan')
    if tested.shape[1]:
        # The scale does not matter to the test, but tiny gradients' fourth powers do to floats.
        tested = (tested - tested.mean(axis=0)) / tested.std(axis=0)
        percent = 100 * float(np.mean(normaltest(tested).pvalue > significance))
    return PNAC(percent, int(varies.sum()), int((~varies).sum()), len(finite))


def spans(steps: int, span: int) -> list[slice]:
    """Spans of `span` recorded steps each, for the test is sharper with more steps.

    The first starts at the first step and the last ends at the last; the rest of less than a span, before the
    last span, is in none. A single span is the end.

    Raises:
        ValueError: there is not one span, or a span is too short for the test.
    """
    if span < LEAST_STEPS:
        raise ValueError(f'span={span}: the test of normality needs at least {LEAST_STEPS} steps')
    if steps < span:
        raise ValueError(f'{steps} steps are recorded, and a span has {span}')
    starts = [*range(0, steps - 2 * span + 1, span), steps - span]
    return [slice(start, start + span) for start in starts]


def density(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Kernel density estimate on `grid` (Fig. 7), with Scott's bandwidth.

    Args:
        values: `(N,)`; NaN is left out.
        grid: `(G,)`, where the density is wanted.

    Returns:
        `(G,)`, or NaN if there are fewer than two values or all are alike: those have no density.
    """
    from scipy.stats import gaussian_kde
    values = np.asarray(values, dtype=np.float64)
    values = values[np.isfinite(values)]
    if len(values) < 2 or np.ptp(values) == 0:
        return np.full(len(grid), np.nan)
    return gaussian_kde(values)(grid)
