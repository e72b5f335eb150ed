"""The subjects of a benchmark of formats: models in several forms."""
from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ..deploy.formats import VARIANTS, Session
from ..deploy.forms import fold_for, runs_on
from ..deploy.openmmlab import prepare_export
from ..deploy.preprocessing import Samples
from ..deploy.saving import export_file
from ..deploy.tasks import TASKS


class Subject:
    """One model of a benchmark: `name` is that of its rows, `meta` the result of :func:`describe_model`.

    The norms of `model`, in eval mode on the CPU, are folded in place, LayerNorms as far as `layer_norms` says; 'keep'
    is for a baseline. `folder` is created for its files. `images` are uint8 `(3, h, w)` training images, for INT8.
    """

    def __init__(self, name: str, model: nn.Module, meta: dict, batch: int, folder: Path, threads: int,
                 images: Sequence[torch.Tensor] = (), layer_norms: str = 'exact'):
        self.name, self.folder, self.threads, self.images, self.batch = name, folder, threads, images, batch
        # One model for all forms: what helps those in INT8 is exact in the others.
        samples = Samples(images, meta, 1) if len(images) else ()
        fold_for(model, 'static', calibration=runs_on(TASKS[meta['task']].graph, samples) if samples else None,
                 layer_norms=layer_norms)
        self.exportable = prepare_export(model, meta, batch)
        folder.mkdir()

    def use_file(self, name: str, file: Path) -> None:
        """Takes an exported file for a form in place of a new one."""
        chosen, _ = VARIANTS[name]
        for source, copy in zip(chosen.files(file), chosen.files(self._path(name)), strict=True):
            shutil.copyfile(source, copy)

    def export(self, name: str) -> tuple[Callable[[], Session], int]:
        """A function that opens a form of the model from `VARIANTS`, and its size in bytes. Exports it the first time.

        Raises a PreflightError if a package is missing, or the file cannot be exported.
        """
        chosen, form = VARIANTS[name]
        path = self._path(name)
        if not path.exists():
            chosen.check(form.int8)
            samples = Samples(self.images, self.exportable.meta, self.batch) if chosen.needs_images(form.int8) else ()
            if chosen.is_offered:
                export_file(self.exportable, chosen, path, int8=form.int8, samples=samples)
            else:  # torch itself
                chosen.export(self.exportable, path)
        return partial(chosen.open, path, self.threads, **form.load_options), chosen.size(path, self.exportable)

    def _path(self, name: str) -> Path:
        chosen, form = VARIANTS[name]
        return self.folder / f'{chosen.name}_{form.int8 or "float"}{chosen.suffixes[0]}'
