"""Writes a model as a file for a runtime, runs the file once, and compares its outputs with torch."""
from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..utils import PreflightError, error_text
from .exportable import Exportable
from .exported import ExportedModel
from .formats import Format

LEAST_IOU = 0.5


@dataclass(frozen=True)
class Differences:
    """The differences between two sets of outputs.

    Each detection is compared with its match in the other set, in any order: a detection of the same class with an IoU
    of at least 0.5, each matched once.
    """
    # The largest absolute difference by kind: `scores`; for a detector also `boxes`, in pixels, and `masks`, the mean
    # difference in probability of each mask. Empty without matches.
    largest: dict[str, float]
    typical: dict[str, float]  # the median over matches; for a classifier, over images
    expected: int | None = None  # number of torch's detections; None for a classifier
    found: int | None = None  # number of the file's detections
    partners: int | None = None  # number of matches

    def __str__(self) -> str:
        if self.expected == self.found == 0:
            return 'unknown, because no object is detected in noise; compare the metrics'
        kinds = ', '.join(f'{kind} {value:.2g} (median {self.typical[kind]:.2g})'
                          for kind, value in self.largest.items())
        if self.expected is None:
            return f'largest difference of {kinds}'
        counts = (f"{self.partners} of torch's {self.expected} detections match one of the file's {self.found} "
                  f'(same class, IoU from {LEAST_IOU})')
        return f'{counts}; largest difference of matches: {kinds}' if kinds else counts


@dataclass(frozen=True)
class ExportReport:
    """A file written by :func:`export_file`; `str()` returns a text."""
    path: Path
    size: int  # bytes on the disk
    norms: int  # number of norms in the model
    difference: Differences  # from torch, on noise
    lines: list[str]  # the format's report on the file

    def __str__(self) -> str:
        return '\n'.join([f'written: {self.path}, {self.size / 1e6:.1f} MB', f'norms left: {self.norms}',
                          f'compared with torch: {self.difference}', *self.lines])


@contextmanager
def whole_files(path: Path) -> Iterator[Path]:
    """A context with a temporary path of the same name. At its end, all files written next to it replace the real ones.

    If the block fails, they are removed, and the files of an earlier export are kept.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        yield Path(folder, path.name)
        for made in sorted(Path(folder).iterdir()):  # .bin before .xml, which needs it
            made.replace(path.parent / made.name)


def export_file(model: Exportable, chosen: Format, path: str | Path, half: bool = False, int8: str | None = None,
                samples: Sequence[tuple[np.ndarray, ...]] = (), **options) -> ExportReport:
    """Writes a model as a file for a runtime, runs it there and compares it with torch.

    `model` is the result of :func:`prepare_export`, `chosen` of :func:`find_format`, and `path` has the suffix of the
    format. See :meth:`Format.export` for the other arguments and the errors; `samples` are like :class:`Samples`.
    """
    path = Path(path)
    with whole_files(path) as part:
        chosen.check_model(model)
        try:
            chosen.export(model, part, half, int8, samples, **options)
            opened = ExportedModel(chosen.open_new(part))
            found = differences(opened(*(each.numpy() for each in model.inputs)), model.expected)
            lines = chosen.report(part)
        except (OSError, PreflightError):
            raise
        except Exception as error:  # the converters and runtimes have no class of errors in common
            raise PreflightError(f'{chosen.runtime} does not take {model.meta["model"]}: '
                                 f'{error_text(error)}') from error
    return ExportReport(path, chosen.size(path, model), model.norms, found, lines)


def differences(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> Differences:
    """Compares the outputs of a file with torch's for the same images; both by name, see :mod:`.graphs`."""
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
