"""Accumulated outlier steps (Fig. 5)."""
from __future__ import annotations

import numpy as np

from ..recording.norm_record import NormRecord, RecordError


def accumulated_outliers(record: NormRecord, points: int = 4) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Outlier steps of each layer up to several points of training.

    Args:
        record: a record.
        points (int): how many points, at equal distances; the last is the end of training. Defaults to 4.

    Returns:
        Names of the layers with a filter, the training steps `(P,)` and the counts `(P, layers)`.

    Raises:
        RecordError: nothing is recorded, or no layer has an outlier filter.
    """
    counts = record.outliers()
    if not len(counts):
        raise RecordError(f'{record.path} holds no step yet.')
    filtered = [i for i, count in enumerate(counts[-1]) if count >= 0]
    if not filtered:
        norms = sorted({layer.norm for layer in record.layers})
        raise RecordError(f'{record.path} has no layer with an outlier filter; its norms are '
                          f'{", ".join(norms)}.')
    rows = np.unique(np.linspace(0, len(counts), points + 1)[1:].round().astype(int) - 1)
    rows = rows[rows >= 0]
    return [record.layers[i].name for i in filtered], record.steps[rows], counts[rows][:, filtered]
