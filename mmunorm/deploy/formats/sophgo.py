"""Files for Sophgo's chips, compiled and simulated by tpu_mlir."""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...utils import PreflightError
from ..graph import Exportable
from ..vendors.process import Vendor, Worker
from .base import listed, register_format
from .chip import Chip, ChipSession
from .onnx import lower_opset

# KL, the compiler's own default, costs 5 dB with a pretrained ViT, and its tuning an hour.
DEFAULTS = dict(processor='bm1688', cali_method='max', tune_num=0)


@register_format
class Sophgo(Chip):
    """The host normalizes the images. The option `wide_attention=True` keeps attention in float16 in INT8 files."""
    name, suffixes, runtime = 'sophgo', ('.bmodel', '.bmodel.json'), "Sophgo's simulator"
    vendor = Vendor('sophgo', 'tpu_mlir', 'tpu_mlir 1.30.2')
    host_normalizes = True

    def compile(self, model: Exportable, path: Path, images: Iterator[np.ndarray], int8: bool,
                options: dict) -> ChipSession:
        options = DEFAULTS | options
        wide_attention = options.pop('wide_attention', False)
        if wide_attention and 'search' in options:
            raise PreflightError('wide_attention and search both choose layers in floating point: give one of them.')
        worker = self.with_sources(model, images)
        lower_opset(worker.sources / 'model.onnx')
        keep_affine(worker.sources / 'model.onnx')
        found, _ = worker.call('compile', shape=model.meta['shape'], out=str(path.resolve()),
                               quantize=options.pop('quantize', 'INT8' if int8 else 'F16'),
                               wide_attention=wide_attention, options=options)
        self.files(path)[1].write_text(json.dumps(model.meta | dict(compiled=found)))
        return self.load(path, None)

    def load(self, path: Path, threads: int | None) -> ChipSession:
        worker = Worker(self.vendor)
        worker.call('open', model=str(path.resolve()))
        return ChipSession(worker, json.loads(self.files(path)[1].read_text()), normalizes=True)

    def usage(self, path: Path) -> str:
        return "use it: with Sophgo's runtime for the chip, with normalized images"

    def facts(self, path: Path) -> dict:
        return json.loads(self.files(path)[1].read_text())['compiled']

    def report(self, path: Path) -> list[str]:
        found = self.facts(path)
        cycles = Counter({name: round(number / 1000) for name, number in found['by_operator'].items()})
        return [f"the compiler's ESTIMATE, not a measurement: {found['ms']:.3f} ms, {found['megabytes']} MB moved",
                f'thousand cycles: {cycles.total()}, most of them {listed(cycles)}']


def keep_affine(path: Path) -> None:
    """Gives LayerNorms without a factor that of the next float32 after 1, and a summand of 1e-30, in place.

    `tpu_mlir` leaves out factors and summands of exactly 1 and 0. It then fails at some graphs in INT8 ('v is none
    type'), and groups others worse: a ViT-S takes 4.70 ms in place of 4.32 ms on a BM1688.
    """
    import onnx
    model = onnx.load(path)
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != 'LayerNormalization' or node.input[1] not in weights:
            continue
        factor, *summand = (weights[name] for name in node.input[1:])
        affine = [np.nextafter(factor, 2, dtype=np.float32) if (factor == 1).all() else factor,
                  np.full_like(factor, 1e-30) if not summand or not summand[0].any() else summand[0]]
        names = [f'{node.name}_{part}' for part in ('factor', 'summand')]
        node.input[:] = [node.input[0], *names]
        model.graph.initializer.extend(map(onnx.numpy_helper.from_array, affine, names))
    onnx.save(model, path)
