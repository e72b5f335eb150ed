"""How far the outputs of a file are from torch's: the signal-to-noise ratio (SNR), with torch's as the signal."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

MIN_IOU = 0.5
MIN_SNR = 60.  # in dB, of a file in floating point; float32 has more than 90
NEGLIGIBLE = 1e-7  # a difference that is no error, as in outputs that are all zero
MIN_MATCHES = 0.9  # of a detector in floating point; of boxes with nearly equal scores, either may be kept


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


@dataclass(frozen=True)
class Comparison:
    """The differences between two sets of outputs."""
    # The largest absolute difference by kind: names of outputs; for a detector `scores`, `boxes`, in pixels, and
    # `masks`, the mean difference in probability of each mask. Empty without matches.
    largest: dict[str, float]
    median: dict[str, float]  # the median over matches, or over images
    snr: dict[str, float] = field(default_factory=dict)  # in dB, by output; of a classifier, that of its logits
    expected: int | None = None  # number of torch's detections; None if the model is no detector
    found: int | None = None  # number of the file's detections
    matches: int | None = None  # number of matches

    def is_within(self, least: float = MIN_SNR) -> bool:
        """Whether the SNR of each output is at least `least` dB; detections must be nearly those of floating point."""
        if least == -math.inf:
            return True
        if self.expected is None:
            return all(snr >= least or self.largest[name] <= NEGLIGIBLE for name, snr in self.snr.items())
        return (self.matches >= MIN_MATCHES * max(self.expected, self.found) - 1
                and self.median.get('scores', 0) < 1e-3)

    def __str__(self) -> str:
        if self.expected is None:
            return ', '.join(f'SNR of {name} {snr:.1f} dB' for name, snr in self.snr.items())
        if self.expected == self.found == 0:
            return 'unknown, because no object is detected; compare the metrics'
        kinds = ', '.join(f'{kind} {value:.2g} (median {self.median[kind]:.2g})'
                          for kind, value in self.largest.items())
        counts = (f"{self.matches} of torch's {self.expected} detections match one of the file's {self.found} "
                  f'(same class, IoU from {MIN_IOU})')
        if self.matches < MIN_MATCHES * max(self.expected, self.found) - 1:
            counts += '; boxes differ, so compare the AP of both: tools/deploy/test.py'
        return f'{counts}; largest difference of matches: {kinds}' if kinds else counts


def tensor_differences(got: dict[str, np.ndarray], expected: dict[str, np.ndarray],
                       signal: Callable[[np.ndarray], np.ndarray] = np.asarray) -> Comparison:
    """Compares tensors by name; `signal` makes of an output what the SNR is of."""
    largest = {name: np.abs(deviation(got[name], exact)).reshape(len(exact), -1).max(1)
               for name, exact in expected.items()}
    return Comparison(*largest_and_median(largest), {
        name: signal_to_noise(signal(got[name]), signal(exact)) for name, exact in expected.items()})


def largest_and_median(distances: dict[str, np.ndarray]) -> tuple[dict[str, float], dict[str, float]]:
    """The maximum and the median by name."""
    return ({kind: float(values.max()) for kind, values in distances.items()},
            {kind: float(np.median(values)) for kind, values in distances.items()})
