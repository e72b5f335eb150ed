"""Writes a model as a file for a runtime, runs the file once, and compares its outputs with torch."""
from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ..utils import PreflightError, error_text, naming, plural, whole_file, written_file
from .exportable import Exportable
from .exported import ExportedModel
from .formats import Format
from .formats.base import MIN_SNR
from .graphs import outputs_by_name
from .progress import progress, stage
from .snr import deviation, signal_to_noise

MIN_IOU = 0.5
NEGLIGIBLE = 1e-7  # a difference that is no error, as in outputs that are all zero
MIN_MATCHES = 0.9  # of a detector in floating point; of boxes with nearly equal scores, either may be kept
COMPARED = 8  # calibration images


@dataclass(frozen=True)
class Differences:
    """The differences between two sets of outputs; detections are compared with their :func:`matches`."""
    # The largest absolute difference by kind: names of outputs; for a detector `scores`, `boxes`, in pixels, and
    # `masks`, the mean difference in probability of each mask. Empty without matches.
    largest: dict[str, float]
    typical: dict[str, float]  # the median over matches, or over images
    snr: dict[str, float] = field(default_factory=dict)  # in dB, by output; of a classifier, that of its logits
    expected: int | None = None  # number of torch's detections; None if the model is no detector
    found: int | None = None  # number of the file's detections
    matches: int | None = None  # number of matches

    @property
    def is_float(self) -> bool:
        """Whether a file in floating point may differ so much."""
        return self.is_within(MIN_SNR)

    def is_within(self, least: float) -> bool:
        """Whether the SNR of each output is at least `least` dB; detections must be nearly those of floating point."""
        if least == -math.inf:
            return True
        if self.expected is None:
            return all(snr >= least or self.largest[name] <= NEGLIGIBLE for name, snr in self.snr.items())
        return (self.matches >= MIN_MATCHES * max(self.expected, self.found) - 1
                and self.typical.get('scores', 0) < 1e-3)

    def __str__(self) -> str:
        if self.expected is None:
            return ', '.join(f'SNR of {name} {snr:.1f} dB' for name, snr in self.snr.items())
        if self.expected == self.found == 0:
            return 'unknown, because no object is detected; compare the metrics'
        kinds = ', '.join(f'{kind} {value:.2g} (median {self.typical[kind]:.2g})'
                          for kind, value in self.largest.items())
        counts = (f"{self.matches} of torch's {self.expected} detections match one of the file's {self.found} "
                  f'(same class, IoU from {MIN_IOU})')
        return f'{counts}; largest difference of matches: {kinds}' if kinds else counts


@dataclass(frozen=True)
class ExportReport:
    """A file written by :func:`export_file`; `str()` returns a text."""
    path: Path
    size: int  # bytes on the disk
    norms: int  # number of norms in the model
    scales: int  # number of LayerNorms and RMSNorms of which a scale of each token is left
    difference: Differences  # from torch
    images: str  # those of the comparison
    lines: list[str]  # the format's report on the file

    def __str__(self) -> str:
        scales = f', scales of a token: {self.scales}' if self.scales else ''
        return '\n'.join([f'written: {self.path}, {self.size / 1e6:.1f} MB', f'norms left: {self.norms}{scales}',
                          f'compared with torch on {self.images}: {self.difference}', *self.lines])


@contextmanager
def whole_files(path: Path) -> Iterator[Path]:
    """A context like :func:`mmunorm.utils.whole_file`, for `path` and all files that are written next to it."""
    written_file(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        with naming(path, Path(folder)):
            yield Path(folder, path.name)
        for written in sorted(Path(folder).iterdir()):  # .bin before .xml, which needs it
            with whole_file(path.parent / written.name) as part:
                shutil.move(written, part)


def export_file(model: Exportable, chosen: Format, path: str | Path, half: bool = False, int8: str | None = None,
                samples: Sequence[tuple[np.ndarray, ...]] = (), **options) -> ExportReport:
    """Writes a model as a file for a runtime, runs it there and compares it with torch.

    `model` is the result of :func:`prepare_export`, `chosen` of :func:`find_format`, and `path` has the suffix of the
    format. See :meth:`Format.export` for the other arguments; `samples` are like :class:`Samples`. The comparison is on
    some of these, or without samples on the sample of the model.

    Raises:
        PreflightError: see :meth:`Format.export`; or a file in floating point differs from torch. No file is written.
    """
    path = Path(path)
    with whole_files(path) as part, progress(f'exporting to {chosen.runtime}'):
        chosen.check_model(model)
        try:
            stage('converting')
            chosen.export(model, part, half, int8, samples, **options)
            stage('comparing')
            images, inputs, expected = _compared(model, samples)
            opened = ExportedModel(chosen.open_new(part))
            found = differences(_joined([opened(*arrays) for arrays in inputs]), expected, model.meta['task'])
            lines = chosen.report(part)
        except (OSError, PreflightError):
            raise
        except ModuleNotFoundError as error:  # of a package that the converter's own requires
            raise PreflightError(f'exporting to {chosen.runtime} needs the package {error.name.partition(".")[0]}, '
                                 'which is not installed.') from error
        except Exception as error:  # the converters and runtimes have no class of errors in common
            raise PreflightError(f'{chosen.runtime} does not take {model.meta["model"]}: '
                                 f'{error_text(error)}') from error
        if not found.is_within(least := chosen.least_snr(half, int8)):
            raise PreflightError(f'{chosen.runtime} computes something else than {model.meta["model"]} on {images}: '
                                 f'{found} (in floating point at least {least:.0f} dB are expected). No file is '
                                 'written; choose another format.')
    return ExportReport(path, chosen.size(path, model), model.norms, model.scales, found, images, lines)


def _compared(model: Exportable, samples: Sequence[tuple[np.ndarray, ...]]
              ) -> tuple[str, list[tuple[np.ndarray, ...]], dict[str, np.ndarray]]:
    """A name of the images of the comparison, the inputs of the file in batches, and torch's outputs."""
    if len(samples):
        source = 'calibration image'
        batches = [samples[index] for index in range(min(len(samples), max(1, COMPARED // len(samples[0][0]))))]
    else:
        source, batches = 'image', [tuple(tensor.numpy() for tensor in model.inputs)]
    number = sum(len(arrays[0]) for arrays in batches)
    about = '' if len(samples) else ' of the example' if model.meta['task'] == 'tensors' else ' of noise'
    outputs = [outputs_by_name(model.graph, map(torch.from_numpy, arrays)) for arrays in batches]
    return f'{plural(number, source)}{about}', batches, _joined(outputs)


def _joined(batches: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def differences(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], task: str) -> Differences:
    """Compares the outputs of a file with torch's for the same images, by name; `task` is that of the metadata."""
    if task != 'detector':
        largest = {name: np.abs(deviation(got[name], exact)).reshape(len(exact), -1).max(1) / (
            np.abs(exact).max() if task == 'features' else 1) for name, exact in expected.items()}
        signal = logits_of if task == 'classifier' else np.asarray
        return Differences(*_largest_and_typical(largest), {
            name: signal_to_noise(signal(got[name]), signal(exact)) for name, exact in expected.items()})
    distances, num_found, num_expected = [], 0, 0
    for image in range(len(expected['dets'])):
        a, b = ({name: array[image][side['dets'][image, :, 4] > 0] for name, array in side.items()}
                for side in (got, expected))
        num_found, num_expected = num_found + len(a['dets']), num_expected + len(b['dets'])
        for i, j in matches(a, b):
            boxes = np.abs(a['dets'][i] - b['dets'][j])
            mask = [np.abs(a['masks'][i] - b['masks'][j]).mean()] if 'masks' in expected else []
            distances.append([boxes[4], boxes[:4].max(), *mask])
    kinds = dict(zip(('scores', 'boxes', 'masks'), np.transpose(distances), strict=False))
    return Differences(*_largest_and_typical(kinds), {}, num_expected, num_found, len(distances))


def logits_of(scores: np.ndarray) -> np.ndarray:
    """The logits of class probabilities `(N, classes)`, with a mean of 0."""
    logits = np.log(np.maximum(scores.astype(np.float64), 1e-30))
    return logits - logits.mean(1, keepdims=True)


def _largest_and_typical(distances: dict[str, np.ndarray]) -> tuple[dict[str, float], dict[str, float]]:
    return ({kind: float(values.max()) for kind, values in distances.items()},
            {kind: float(np.median(values)) for kind, values in distances.items()})


def matches(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """Pairs of detections of one image, by `dets` `(n, 5)` and `labels` `(n, )`: of the same class, in any order.

    Each is matched once, by the best IoU of at least 0.5, then the nearest score.
    """
    from torchvision.ops import box_iou
    overlap = box_iou(torch.from_numpy(a['dets'][:, :4]), torch.from_numpy(b['dets'][:, :4])).numpy()
    overlap[a['labels'][:, None] != b['labels'][None]] = 0
    difference = np.abs(a['dets'][:, None, 4] - b['dets'][None, :, 4])
    rows, columns = np.nonzero(overlap >= MIN_IOU)
    order = np.lexsort((difference[rows, columns], -overlap[rows, columns]))
    pairs = {}
    for i, j in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if i not in pairs and j not in pairs.values():
            pairs[i] = j
    return list(pairs.items())
