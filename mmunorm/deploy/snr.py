"""The signal-to-noise ratio (SNR) of a file's outputs, with torch's as the signal."""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def deviation(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The difference in float64; equal values have none, infinite ones too."""
    with np.errstate(invalid='ignore'):
        return np.where(got == exact, 0, got.astype(np.float64) - exact)


def signal_to_noise(got: np.ndarray, exact: np.ndarray) -> float:
    """The SNR of an array in dB."""
    noise = np.square(deviation(got, exact)).sum()
    signal = np.square(exact[np.isfinite(exact)].astype(np.float64)).sum()
    with np.errstate(divide='ignore'):
        return float(10 * np.log10(signal / noise)) if noise else math.inf


def mean_snr(got: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """The mean SNR of several arrays in dB, each at most 300."""
    return float(np.mean([np.clip(signal_to_noise(a, b), -300, 300) for a, b in zip(got, exact, strict=True)]))
