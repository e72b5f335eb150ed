"""What the formats of chips' compilers share; each is compiled and simulated in the vendor's own Python."""
from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..graph import Exportable, norms_left
from ..vendors.graph import for_compiler, images_for, outputs_of
from ..vendors.process import Vendor, Worker
from .base import Batches, Format, Session, counted
from .onnx import write_onnx


class ChipSession(Session):
    """A file in the vendor's simulator."""

    def __init__(self, worker: Worker, meta: dict, normalizes: bool = False):
        self.worker, self.meta, self.normalizes = worker, meta, normalizes

    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        _, outs = self.worker.call('run', images_for(arrays, self.meta, self.normalizes))
        return outputs_of(outs, self.meta)


class Chip(Format):
    """Files that a vendor's compiler writes: in INT8, else in float16."""
    packages = ('onnx', 'onnxscript')
    tasks = ('classifier', 'features', 'tensors')
    int8_kinds = ('static', )
    takes_vendor_options = True
    vendor: Vendor
    in_file = host_normalizes = False  # whether the file's first layer or the host normalizes, else the chip's runtime
    centers = False  # whether attention in INT8 is centered if the model is folded; the option `center_attention`

    def check(self, int8: str | None = None, option: str = 'int8') -> str | None:
        """Like the base class; the vendor's package may be in another Python."""
        int8 = super().check(int8, option)
        self.vendor.python()
        return int8

    def export(self, model: Exportable, path: Path, half: bool = False, int8: str | None = None,
               samples: Batches = (), **options) -> None:
        """Like the base class; `options` are the vendor's own, by name."""
        centers = self.centers and options.pop('center_attention', True) and bool(int8 and norms_left(model.graph)[1])
        model = for_compiler(model, self.in_file, centers)
        images = (image[None] for arrays in samples for image in images_for(arrays, model.meta, self.host_normalizes))
        self._opened = self.compile(model, path, images if int8 else iter(()), bool(int8), options)

    def with_sources(self, model: Exportable, images: Iterator[np.ndarray]) -> Worker:
        """A process with what a compiler reads in its `sources`: `model.onnx` and `samples/00000.npy`."""
        worker = Worker(self.vendor)
        (worker.sources / 'samples').mkdir(parents=True)
        write_onnx(model, worker.sources / 'model.onnx')
        for index, image in enumerate(images):
            np.save(worker.sources / f'samples/{index:05}.npy', image)
        return worker

    @abstractmethod
    def compile(self, model: Exportable, path: Path, images: Iterator[np.ndarray], int8: bool,
                options: dict) -> ChipSession:
        """Writes the files of `path`, and returns them opened; `images` `(1, C, H, W)` are for the ranges of INT8."""

    @abstractmethod
    def facts(self, path: Path) -> dict:
        """What the compiler tells about a file, such as `ms`, an estimate, and `operators`, numbers by name."""

    def report(self, path: Path) -> list[str]:
        return [f"operators: {counted(Counter(self.facts(path)['operators']))}"]

    def least_snr(self, half: bool, int8: str | None) -> float:
        return -math.inf if int8 else 30.

    def size(self, path: Path, model: Exportable) -> int:
        """Size of the chip's own file in bytes."""
        return path.stat().st_size
