"""Writes a model as a file for a runtime, runs the file once, and compares its outputs with torch."""
from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..utils import PreflightError, error_text, plural, whole_file, written_file
from .comparison import Comparison
from .formats import Format
from .formats.base import stage
from .formats.pytorch import TorchSession
from .graph import Exportable, norms_left
from .runtime import ExportedModel
from .tasks import TASKS

COMPARED = 8  # calibration images
USUAL = ('usual in INT8: 20 to 40 dB with norms in float, 9 (a ViT with LayerNorm) to 35 dB full-integer; with random '
         'weights or on noise 7 to 30 dB')


@dataclass(frozen=True)
class ExportReport:
    """A file written by :func:`export_file`; `str()` returns a text."""
    path: Path
    size: int  # bytes on the disk
    norms: int  # number of norms with weights in the model
    plain: int  # number of LayerNorms and RMSNorms without weights, which folding has left
    difference: Comparison  # from torch
    images: str  # those of the comparison
    lines: list[str]  # the format's report on the file

    def __str__(self) -> str:
        plain = f', {self.plain} of them without weights' if self.plain else ''
        return '\n'.join([f'written: {self.path}, {self.size / 1e6:.1f} MB',
                          f'norms left: {self.norms + self.plain}{plain}',
                          f'compared with torch on {self.images}: {self.difference}', *self.lines])


@contextmanager
def whole_files(path: Path) -> Iterator[Path]:
    """A context like :func:`mmunorm.utils.whole_file`, for `path` and all files that are written next to it."""
    written_file(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        yield Path(folder, path.name)
        for written in sorted(Path(folder).iterdir()):  # .bin before .xml, which needs it
            with whole_file(path.parent / written.name) as part:
                shutil.move(written, part)


def export_file(model: Exportable, chosen: Format, path: str | Path, half: bool = False, int8: str | None = None,
                samples: Sequence[tuple[np.ndarray, ...]] = (), **options) -> ExportReport:
    """Writes a model as a file for a runtime, runs it there and compares it with torch.

    `path` has the suffix of the format; see :meth:`Format.export` for the other arguments. The comparison is on some of
    the `samples`, or without these on the sample of the model.

    Raises a PreflightError as :meth:`Format.export`, or if a file in floating point differs from torch; then no file is
    written.
    """
    path, task = Path(path), TASKS[model.meta['task']]
    with whole_files(path) as part:
        chosen.check_model(model, half)
        try:
            stage(f'converting to {chosen.runtime}')
            lines = [*(chosen.export(model, part, half, int8, samples, **options) or ())]
            stage('comparing with torch')
            opened, exact = ExportedModel(chosen.open_new(part)), ExportedModel(TorchSession(model.graph, model.meta))
            example = [x.numpy() for x in model.inputs]

            def compared(arrays: list[np.ndarray]) -> Comparison:
                return task.differences(opened(*arrays), exact(*arrays))

            source, images = _compared(model, samples)
            found = compared(images or example)
            if images and model.meta['task'] == 'tensors':
                lines.insert(0, f'on the example: {compared(example)}')
            norms, plain = map(len, norms_left(model.graph))
            lines = [*([USUAL] if int8 and found.snr else []), *lines, *chosen.report(part)]
        except (OSError, PreflightError):
            raise
        except ModuleNotFoundError as error:  # of a package that the converter's own requires
            raise PreflightError(f'exporting to {chosen.runtime} needs the package {error.name.partition(".")[0]}, '
                                 'which is not installed.') from error
        except Exception as error:  # the converters and runtimes have no class of errors in common
            raise PreflightError(f'{chosen.runtime} does not take {model.meta["model"]}: '
                                 f'{error_text(error)}') from error
        if not found.is_within(least := chosen.least_snr(half, int8)):
            raise PreflightError(f'{chosen.runtime} computes something else than {model.meta["model"]} on {source}: '
                                 f'{found} (in floating point at least {least:.0f} dB are expected). No file is '
                                 'written; choose another format.')
    return ExportReport(path, chosen.size(path, model), norms, plain, found, source, lines)


def _compared(model: Exportable, samples: Sequence[tuple[np.ndarray, ...]]) -> tuple[str, list[np.ndarray]]:
    """A name of the images of the comparison, and the inputs of the file; [] for the sample of the model."""
    if not len(samples):
        about = 'the example' if model.meta['task'] == 'tensors' else 'noise'
        return f'{plural(len(model.inputs[0]), "image")} of {about}', []
    batch = len(samples[0][0])
    batches = [samples[index] for index in range(min(len(samples), max(1, COMPARED // batch)))]
    return (f'{len(batches) * batch} of {plural(len(samples) * batch, "calibration image")}',
            [np.concatenate(arrays) for arrays in zip(*batches, strict=True)])
