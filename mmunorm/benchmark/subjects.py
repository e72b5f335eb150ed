"""What a benchmark of formats compares: a model in each of its forms."""
from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ..deploy.export import prepare_export
from ..deploy.formats import VARIANTS, Session
from ..deploy.images import Samples
from ..deploy.saving import whole_files
from ..fusion import fuse_norms


class Subject:
    """One model of a benchmark.

    Args:
        name (str): of its rows.
        model (nn.Module): in eval mode, on the CPU; its norms are folded, in place, and `exportable` is the result.
        meta (dict): what :func:`describe_model` returns.
        batch (int): images at once.
        folder (Path): for its files; it is made.
        threads (int): of the CPU.
        images (Sequence[Tensor]): uint8 `(3, h, w)` training images, for INT8. Defaults to none.
    """

    def __init__(self, name: str, model: nn.Module, meta: dict, batch: int, folder: Path, threads: int,
                 images: Sequence[torch.Tensor] = ()):
        self.name, self.folder, self.threads, self.images, self.batch = name, folder, threads, images, batch
        fuse_norms(model)
        self.exportable = prepare_export(model, meta, batch)
        folder.mkdir()

    def give(self, name: str, file: Path) -> None:
        """Takes an exported file as the one of a form, which :meth:`made` then does not write."""
        chosen, _ = VARIANTS[name]
        for source, copy in zip(chosen.files(file), chosen.files(self._path(name)), strict=True):
            shutil.copyfile(source, copy)

    def made(self, name: str) -> tuple[Callable[[], Session], int]:
        """What opens a form of the model, of `VARIANTS`, and its size in bytes. The file is written the first time.

        Raises:
            PreflightError: a package is missing, INT8 is asked for and there are no images, or the runtime cannot
                take the model in this form.
        """
        chosen, form = VARIANTS[name]
        path = self._path(name)
        if not path.exists():
            chosen.check(form.int8 is not None)
            samples = ()
            if chosen.needs_images(form.int8):
                samples = Samples(self.images, self.exportable.meta, self.batch)
            with whole_files(path) as part:  # an export that is refused may have written a file in floating point
                chosen.export(self.exportable, part, int8=form.int8, samples=samples)
        return partial(chosen.open, path, self.threads, **form.how), chosen.size(path, self.exportable)

    def _path(self, name: str) -> Path:
        chosen, form = VARIANTS[name]
        return self.folder / f'{chosen.name}_{form.int8 or "float"}{chosen.suffixes[0]}'
