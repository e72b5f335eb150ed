"""Geometric and arithmetic means over the last M steps (Fig. 4), and channels worth looking at."""
from __future__ import annotations

import numpy as np
import torch

from ..norms.averages import arithmetic_mean, geometric_mean


def rolling_means(sequence: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """GM and AM of the last `window` values at each step.

    Args:
        sequence: `(T,)`.
        window (int): M.

    Returns:
        GM and AM `(T,)` float64. Both are NaN for the first M - 1 steps. GM is also NaN where the window has a
        negative value.

    Raises:
        ValueError: `window` is not in 1 ... T.
    """
    if not 1 <= window <= len(sequence):
        raise ValueError(f'window={window}: must be from 1 to the number of steps, {len(sequence)}')
    windows = torch.from_numpy(np.asarray(sequence, dtype=np.float64)).unfold(0, window, 1).T
    means = np.full((2, len(sequence)), np.nan)
    means[0, window - 1:] = geometric_mean(windows)
    means[1, window - 1:] = arithmetic_mean(windows)
    return means[0], means[1]


def peak(statistics: np.ndarray) -> int:
    """The channel with the highest peak relative to its own median; the first if all medians are 0.

    Args:
        statistics: `(T, C)`. Their absolute values count. Steps with a value that is not finite are left out.
    """
    size = np.abs(statistics[np.isfinite(statistics).all(axis=1)])
    if not len(size):
        return 0
    median = np.median(size, axis=0)
    with np.errstate(divide='ignore', invalid='ignore'):
        ratio = np.where(median > 0, size.max(axis=0) / median, 0.)
    return int(ratio.argmax())
