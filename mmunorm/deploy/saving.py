"""Writes a model as a file for a runtime, and runs that file once."""
from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .differences import Differences, differences
from .export import Exportable
from .formats import Format
from .runner import Runner


@dataclass(frozen=True)
class Exported:
    """A file that :func:`export_file` has written.

    Attributes:
        path: the file.
        size: bytes on the disk.
        norms: number of norms left in the model.
        difference: to torch, for pictures of noise.
        lines: what the format says about the file.
    """
    path: Path
    size: int
    norms: int
    difference: Differences
    lines: list[str]


def export_file(model: Exportable, chosen: Format, path: str | Path, half: bool = False, int8: str | None = None,
                samples: Sequence[tuple[np.ndarray, ...]] = (), **options) -> Exported:
    """Writes a model as a file for a runtime, runs it there and compares it with torch.

    Args:
        model (Exportable): what :func:`prepare_export` returns.
        chosen (Format): what :func:`find_format` returns.
        path: of the file, with the suffix of the format.
        half (bool): weights in float16. Defaults to False.
        int8 (str, optional): the kind of INT8, one of `chosen.int8_kinds`.
        samples (Sequence[tuple[np.ndarray, ...]]): batches of inputs that the ranges of INT8 are taken from, such as
            :class:`Samples`.
        **options: of `chosen.options`.

    Raises:
        PreflightError: torch cannot export the model.
    """
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # All files are made and tried in here: a failure leaves those of an earlier export as they are.
        part = Path(folder, path.name)
        chosen.export(model, part, half, int8, samples, **options)
        found = differences(Runner(chosen.open_new(part))(*(each.numpy() for each in model.inputs)), model.expected)
        lines = chosen.report(part)
        for made in sorted(Path(folder).iterdir()):  # .bin before .xml: one without the other is of no use
            made.replace(path.parent / made.name)
    return Exported(path, chosen.size(path, model), model.norms, found, lines)
