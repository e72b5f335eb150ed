"""Writes a model as a file for a runtime, runs that file once, and compares what it computes with torch."""
from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .exportable import Exportable
from .exported import ExportedModel
from .formats import Format

LEAST_IOU = 0.5


@dataclass(frozen=True)
class Differences:
    """How far two sets of outputs are apart.

    Of detectors, each detection is compared with its partner on the other side, at any place of the list:
    of the same class, with an IoU of at least 0.5, each used once.
    """
    # The largest absolute difference by kind: `scores`; of a detector also `boxes`, in pixels, and `masks`, in
    # probability, each mask's mean. Empty if there are no partners.
    largest: dict[str, float]
    typical: dict[str, float]  # the median over partners of the same; of a classifier, over images
    expected: int | None = None  # detections of torch; None for a classifier
    found: int | None = None  # those of the file
    partners: int | None = None  # how many of them have one

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


@dataclass(frozen=True)
class ExportReport:
    """A file that :func:`export_file` has written."""
    path: Path
    size: int  # bytes on the disk
    norms: int  # number of norms left in the model
    difference: Differences  # to torch, for images of noise
    lines: list[str]  # what the format says about the file


@contextmanager
def whole_files(path: Path) -> Iterator[Path]:
    """Gives a path of this name in a new folder. At the end of the `with` block, all files there move beside `path`.

    If the block fails, they are removed, and those of an earlier export stay.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        yield Path(folder, path.name)
        for made in sorted(Path(folder).iterdir()):  # .bin before .xml: one without the other is of no use
            made.replace(path.parent / made.name)


def export_file(model: Exportable, chosen: Format, path: str | Path, half: bool = False, int8: str | None = None,
                samples: Sequence[tuple[np.ndarray, ...]] = (), **options) -> ExportReport:
    """Writes a model as a file for a runtime, runs it there and compares it with torch.

    `model` is what :func:`prepare_export` returns, `chosen` what :func:`find_format` returns, and the suffix of `path`
    is the format's. The other arguments, and the errors, are those of :meth:`Format.export`; `samples` are such as
    :class:`Samples`.
    """
    path = Path(path)
    with whole_files(path) as part:
        chosen.check_model(model)
        chosen.export(model, part, half, int8, samples, **options)
        opened = ExportedModel(chosen.open_new(part))
        found = differences(opened(*(each.numpy() for each in model.inputs)), model.expected)
        lines = chosen.report(part)
    return ExportReport(path, chosen.size(path, model), model.norms, found, lines)


def differences(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> Differences:
    """Compares the outputs of a file with torch's, for the same images; both by name, see :mod:`.graphs`."""
    if 'dets' not in expected:
        scale = {name: np.abs(each).max() if name.startswith('map') else 1 for name, each in expected.items()}
        return Differences(*_largest_and_typical({
            name: np.abs(got[name].astype(np.float64) - each).reshape(len(each), -1).max(1) / scale[name]
            for name, each in expected.items()}))
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
    """Pairs of detections of one image, by `dets` `(n, 5)` and `labels` `(n, )`; the best IoU first, then the nearest
    in score.
    """
    from torchvision.ops import box_iou
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
