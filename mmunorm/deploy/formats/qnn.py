"""ONNX files for Qualcomm's HTP: with quantized activations as ONNX Runtime's QNN provider takes them."""
from __future__ import annotations

import inspect
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..graph import Exportable
from ..vendors.process import Vendor, Worker
from .base import register_format, silent
from .chip import Chip, ChipSession
from .onnx import read_meta, reader_of, write_onnx

# Options of the provider for float16, which the emulation has only of a certain chip: that of a Snapdragon 8 Gen 3.
HALF = dict(enable_htp_fp16_precision='1', soc_model='57', htp_arch='75')


@register_format
class Qnn(Chip):
    """The session is Qualcomm's emulation of the chip on x86.

    Options of an export are arguments of ONNX Runtime's `get_qnn_qdq_config` or options of the provider; and
    `wide_attention=True`: the probabilities of attention in 16 bits.
    """
    name, suffixes, runtime = 'qnn', ('.qnn.onnx', ), "Qualcomm's emulation"
    packages = (*Chip.packages, 'onnxruntime')
    vendor = Vendor('qnn', 'onnxruntime_qnn', 'onnxruntime-qnn 2.7.0')
    in_file = True

    def compile(self, model: Exportable, path: Path, images: Iterator[np.ndarray], int8: bool,
                options: dict) -> ChipSession:
        from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config
        known = {*inspect.signature(get_qnn_qdq_config).parameters, 'wide_attention'}
        quantization = {name: value for name, value in options.items() if name in known}
        provider = {name: str(value) for name, value in options.items() if name not in known}
        model.meta['qnn'] = provider if int8 else HALF | provider
        write_onnx(model, path)
        if int8:
            quantize_for_qnn(path, ({'images': image} for image in images), **quantization)
        return self.load(path, None)

    def load(self, path: Path, threads: int | None) -> ChipSession:
        worker, meta = Worker(self.vendor), read_meta(path)
        worker.call('open', model=str(path.resolve()), options=(meta or {}).get('qnn', {}))
        return ChipSession(worker, meta)

    def facts(self, path: Path) -> dict:
        import onnx
        kinds = Counter(node.op_type for node in onnx.load(path).graph.node)
        del kinds['QuantizeLinear'], kinds['DequantizeLinear']
        return dict(operators=dict(kinds.most_common()))

    def usage(self, path: Path) -> str:
        return "use it: with ONNX Runtime's QNNExecutionProvider on a Snapdragon"


def quantize_for_qnn(path: Path, inputs: Iterator[dict[str, np.ndarray]], wide_attention: bool = False,
                     **options) -> None:
    """Quantizes a file in floating point by ONNX Runtime's settings for QNN, in place.

    `inputs` are calibration images by input name, `options` arguments of `get_qnn_qdq_config`; types and methods are
    names, such as `activation_type='QUInt16'`. `wide_attention` has 16 bits for the output of each softmax.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantType, quantize
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model
    for name, kinds in dict(activation_type=QuantType, weight_type=QuantType,
                            calibrate_method=CalibrationMethod).items():
        if isinstance(options.get(name), str):
            options[name] = kinds[options[name]]
    with silent(), tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder, 'prepared.onnx')
        source = prepared if qnn_preprocess_model(path, prepared) else path
        if wide_attention:
            wide = {name: [dict(quant_type=QuantType.QUInt16)] for node in onnx.load(source).graph.node
                    if node.op_type == 'Softmax' for name in node.output}
            options['init_overrides'] = wide | (options.get('init_overrides') or {})
        quantize(source, path, get_qnn_qdq_config(source, reader_of(inputs), **options))
