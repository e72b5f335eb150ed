"""INT8 with ONNX Runtime's own quantizer."""
from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np

# Not Add and Mul, whose default would put the residual stream into 8 bits.
OPERATORS = ['Conv', 'Gemm', 'MatMul']


def quantize(source: str | Path, path: str | Path, inputs: Iterable[dict[str, np.ndarray]],
             symmetric: bool = False) -> None:
    """Writes an ONNX file in INT8, with QuantizeLinear and DequantizeLinear around what is quantized.

    Weights have 7 of their 8 bits, for CPUs without VNNI; products of two activations stay in floating point.

    Args:
        source: the file in floating point.
        path: the file to write.
        inputs: batches of the model's inputs, by their names.
        symmetric (bool): int8 activations with a zero point of 0, which TensorRT needs; else uint8.
            Defaults to False.
    """
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Reader(CalibrationDataReader):

        def __init__(self):
            self._batches = iter(inputs)

        def get_next(self):
            return next(self._batches, None)

    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)  # it advises a step that the exporter has done
    try:
        quantize_static(
            source, path, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, reduce_range=not symmetric,
            activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8, weight_type=QuantType.QInt8,
            op_types_to_quantize=OPERATORS,
            extra_options=dict(ActivationSymmetric=symmetric, MatMulConstBOnly=True,
                               OpTypesToExcludeOutputQuantization=OPERATORS))
    finally:
        logger.setLevel(level)
