"""Files for Rockchip's NPUs, compiled and simulated by rknn-toolkit2.

The simulator runs no `.rknn` file, but what it has just compiled: a second file has all that this needs.

In INT8, attentions of a folded model subtract the mean of keys and values over each image. On this chip that gives
another 5 dB in a pretrained ViT, for some operators more; on the others, the constant that folding subtracts does as
well. The option `center_attention=False` leaves it out.
"""
from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..graph import Exportable
from ..vendors.process import Vendor, Worker
from .base import counted, register_format
from .chip import Chip, ChipSession
from .onnx import write_onnx


@register_format
class Rknn(Chip):
    name, suffixes, runtime = 'rknn', ('.rknn', '.rknn.zip'), "Rockchip's simulator"
    norms_as = {'static': 'exNorm in float16'}
    centers = True
    vendor = Vendor('rknn', 'rknn', 'rknn-toolkit2 2.5.0')

    def compile(self, model: Exportable, path: Path, images: Iterator[np.ndarray], int8: bool,
                options: dict) -> ChipSession:
        source = self.files(path)[1]
        with zipfile.ZipFile(source, 'w', zipfile.ZIP_DEFLATED) as archive, tempfile.TemporaryDirectory() as folder:
            write_onnx(model, Path(folder, 'model.onnx'))
            archive.write(Path(folder, 'model.onnx'), 'model.onnx', zipfile.ZIP_STORED)
            for index, image in enumerate(images):
                content = io.BytesIO()
                np.save(content, image)
                archive.writestr(f'samples/{index:05}.npy', content.getvalue())
            archive.writestr('meta.json', json.dumps(model.meta))
            archive.writestr('options.json', json.dumps(dict(target_platform='rk3588') | options))
        session, found = self._build(source, path)
        with zipfile.ZipFile(source, 'a') as archive:
            archive.writestr('compiled.json', json.dumps(found))
        return session

    def load(self, path: Path, threads: int | None) -> ChipSession:
        return self._build(self.files(path)[1])[0]

    def _build(self, source: Path, out: Path | None = None) -> tuple[ChipSession, dict]:
        """Compiles what a second file has; returns it in the simulator, and what the compiler tells."""
        worker = Worker(self.vendor)
        folder = Path(worker.folder.name, 'source')
        with zipfile.ZipFile(source) as archive:
            archive.extractall(folder)
        meta, options = (json.loads(Path(folder, f'{name}.json').read_text()) for name in ('meta', 'options'))
        samples = folder / 'samples'
        found, _ = worker.call(
            'compile', model=str(folder / 'model.onnx'), samples=str(samples) if samples.exists() else None,
            out=out and str(out.resolve()), mean=meta['host']['mean'], std=meta['host']['std'], options=options)
        return ChipSession(worker, meta), found

    def usage(self, path: Path) -> str:
        return f"use it: with Rockchip's runtime for the chip; {self.files(path)[1].name} is for the simulator alone"

    def facts(self, path: Path) -> dict:
        with zipfile.ZipFile(self.files(path)[1]) as archive:
            return json.loads(archive.read('compiled.json'))

    def report(self, path: Path) -> list[str]:
        found = self.facts(path)
        return [f"operators: {counted(Counter(found['operators']))}", f"memory moved: {found['megabytes']} MB"]
