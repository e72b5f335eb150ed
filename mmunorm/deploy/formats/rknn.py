"""Files for Rockchip's NPUs, compiled and simulated by rknn-toolkit2.

The simulator runs no `.rknn` file, but what it has just compiled: a second file has all that this needs.
"""
from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..graph import Exportable
from ..vendors.process import Vendor, Worker
from .base import register_format
from .chip import Chip, ChipSession

SETTINGS = 'settings.json'  # in the second file


@register_format
class Rknn(Chip):
    name, suffixes, runtime = 'rknn', ('.rknn', '.rknn.zip'), "Rockchip's simulator"
    centers = True  # another 5 dB in a pretrained ViT; on other chips the constant that folding subtracts does as well
    vendor = Vendor('rknn', 'rknn', 'rknn-toolkit2 2.5.0')

    def compile(self, model: Exportable, path: Path, images: Iterator[np.ndarray], int8: bool,
                options: dict) -> ChipSession:
        worker = self.with_sources(model, images)
        settings = dict(meta=model.meta, options=dict(target_platform='rk3588') | options)
        settings['compiled'] = build(worker, settings, str(path.resolve()))
        (worker.sources / SETTINGS).write_text(json.dumps(settings))
        shutil.make_archive(str(self.files(path)[1].with_suffix('')), 'zip', worker.sources)
        return ChipSession(worker, model.meta)

    def load(self, path: Path, threads: int | None) -> ChipSession:
        worker = Worker(self.vendor)
        shutil.unpack_archive(self.files(path)[1], worker.sources)
        settings = json.loads((worker.sources / SETTINGS).read_text())
        build(worker, settings)
        return ChipSession(worker, settings['meta'])

    def usage(self, path: Path) -> str:
        return f"use it: with Rockchip's runtime for the chip; {self.files(path)[1].name} is for the simulator alone"

    def facts(self, path: Path) -> dict:
        with zipfile.ZipFile(self.files(path)[1]) as archive:
            return json.loads(archive.read(SETTINGS))['compiled']

    def report(self, path: Path) -> list[str]:
        return [*super().report(path), f"memory moved: {self.facts(path)['megabytes']} MB"]


def build(worker: Worker, settings: dict, out: str | None = None) -> dict:
    """Compiles a process's sources, to a file or for the simulator alone; returns what the compiler tells."""
    host = settings['meta']['host']
    return worker.call('compile', out=out, mean=host['mean'], std=host['std'], options=settings['options'])[0]
