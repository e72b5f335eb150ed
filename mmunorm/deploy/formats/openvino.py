"""OpenVINO files: a graph and its weights."""
from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np

from ..graph import Exportable
from .base import KEY, Batches, Format, Session, Variant, register_format, silent, stage
from .onnx import IN_FLOAT, write_onnx


class OpenVinoSession(Session):

    def __init__(self, path: Path, threads: int | None):
        import openvino
        core = openvino.Core()
        model = core.read_model(path)
        self.meta = json.loads(model.get_rt_info([KEY]).astype(str)) if KEY in model.get_rt_info() else None
        # Without the hint, OpenVINO uses bfloat16 by default on some CPUs.
        config = {'INFERENCE_PRECISION_HINT': 'f32'} | ({'INFERENCE_NUM_THREADS': threads} if threads else {})
        self.compiled = core.compile_model(model, 'CPU', config)

    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        results = self.compiled(arrays)
        return [results[output].copy() for output in self.compiled.outputs]


@register_format
class OpenVino(Format):
    name, suffixes, runtime, session = 'openvino', ('.xml', '.bin'), 'OpenVINO', OpenVinoSession
    packages, run_packages = ('onnx', 'onnxscript', 'openvino'), ('openvino', )
    int8_kinds, int8_packages = ('static', ), ('nncf', )
    variants = {'openvino': Variant(runtime), 'openvino-int8': Variant(f'{runtime} INT8', 'static')}

    def export(self, model: Exportable, path: Path, half: bool = False, int8: str | None = None,
               samples: Batches = ()) -> None:
        import openvino
        source = path.with_suffix('.onnx')
        write_onnx(model, source)
        graph = openvino.convert_model(source)
        source.unlink()
        if int8:
            stage(f'calibrating on {len(samples)} batches, quantizing')
            with silent():  # progress bars
                graph = quantize_graph(graph, samples)
        graph.set_rt_info(json.dumps(model.meta), [KEY])
        openvino.save_model(graph, path, compress_to_fp16=half)


def quantize_graph(graph, inputs: Batches):
    """Quantizes an `openvino.Model` to INT8 with NNCF; `inputs` are calibration batches.

    SmoothQuant is off: on the digits Swin it cost 5 dB. Weights use 7 bits: with 8, CPUs without VNNI saturate the sum
    of two products, which cost 13 dB on the same model (docs/results/int8.md). Ranges are the extremes over all
    batches: NNCF's default, the mean over the batches, depends on their size and cost 12 dB with single images.
    """
    import nncf
    from nncf.quantization.range_estimator import RangeEstimatorParametersSet
    nncf.set_log_level(logging.ERROR)
    return nncf.quantize(
        graph, nncf.Dataset(inputs), subset_size=len(inputs), model_type=nncf.ModelType.TRANSFORMER,
        ignored_scope=nncf.IgnoredScope(patterns=[f'.*{IN_FLOAT}.*'], validate=False),
        advanced_parameters=nncf.AdvancedQuantizationParameters(
            overflow_fix=nncf.OverflowFix.ENABLE,
            activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
            smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=-1., convolution=-1.)))
