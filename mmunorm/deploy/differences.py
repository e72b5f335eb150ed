"""How far the outputs of a file are from torch's."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torchvision.ops import box_iou

LEAST_IOU = 0.5


@dataclass(frozen=True)
class Differences:
    """How far two sets of outputs are apart.

    Of detectors, each detection is compared with its partner on the other side, at any place of the list:
    of the same class, with an IoU of at least 0.5, each used once.

    Attributes:
        largest: the largest absolute difference by kind: `scores`; of a detector also `boxes`, in pixels, and `masks`,
            in probability, each mask's mean. Empty if there are no partners.
        typical: the median over partners of the same; of a classifier, over pictures.
        expected, found: number of detections of torch and of the file; None for a classifier.
        partners: how many of them have one.
    """
    largest: dict[str, float]
    typical: dict[str, float]
    expected: int | None = None
    found: int | None = None
    partners: int | None = None

    def __str__(self) -> str:
        if self.expected == self.found == 0:
            return 'unknown, because no object is found in noise: compare the metrics'
        kinds = ', '.join(f'{kind} {value:.2g} (median {self.typical[kind]:.2g})'
                          for kind, value in self.largest.items())
        if self.expected is None:
            return f'largest difference of {kinds}'
        counts = (f"{self.partners} of torch's {self.expected} detections have a partner among the file's {self.found} "
                  f'(same class, IoU from {LEAST_IOU})')
        return f'{counts}; largest difference of partners: {kinds}' if kinds else counts


def differences(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> Differences:
    """Compares the outputs of a file with torch's, for the same pictures.

    Args:
        got, expected (dict[str, np.ndarray]): by name of output, see :mod:`.graphs`.
    """
    if 'dets' not in expected:
        return Differences(*_largest_and_typical(dict(scores=np.abs(got['scores'] - expected['scores']).max(1))))
    apart, number, wanted = [], 0, 0
    for image in range(len(expected['dets'])):
        a, b = ({name: array[image][side['dets'][image, :, 4] > 0] for name, array in side.items()}
                for side in (got, expected))
        number, wanted = number + len(a['dets']), wanted + len(b['dets'])
        for i, j in partners(a, b):
            boxes = np.abs(a['dets'][i] - b['dets'][j])
            mask = [np.abs(a['masks'][i] - b['masks'][j]).mean()] if 'masks' in expected else []
            apart.append([boxes[4], boxes[:4].max(), *mask])
    kinds = dict(zip(('scores', 'boxes', 'masks'), np.transpose(apart), strict=False))
    return Differences(*_largest_and_typical(kinds), wanted, number, len(apart))


def _largest_and_typical(apart: dict[str, np.ndarray]) -> tuple[dict[str, float], dict[str, float]]:
    return ({kind: float(values.max()) for kind, values in apart.items()},
            {kind: float(np.median(values)) for kind, values in apart.items()})


def partners(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """Pairs of detections of one picture, the best IoU first; of equal ones, the nearest in score.

    Args:
        a, b (dict[str, np.ndarray]): `dets` `(n, 5)` and `labels` `(n, )`.
    """
    overlap = box_iou(torch.from_numpy(a['dets'][:, :4]), torch.from_numpy(b['dets'][:, :4])).numpy()
    overlap[a['labels'][:, None] != b['labels'][None]] = 0
    apart = np.abs(a['dets'][:, None, 4] - b['dets'][None, :, 4])
    rows, columns = np.nonzero(overlap >= LEAST_IOU)
    order = np.lexsort((apart[rows, columns], -overlap[rows, columns]))
    pairs = {}
    for i, j in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if i not in pairs and j not in pairs.values():
            pairs[i] = j
    return list(pairs.items())
