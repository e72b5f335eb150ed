"""INT8 with ONNX Runtime's own quantizer."""
from __future__ import annotations

import logging
from collections import Counter
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
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    model = onnx.load(source)
    weights = {tensor.name for tensor in model.graph.initializer}
    of_activations = [node.name for node in model.graph.node
                      if node.op_type == 'MatMul' and node.input[1] not in weights]
    give_own_inputs(model.graph)

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
            model, path, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, reduce_range=not symmetric,
            activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8, weight_type=QuantType.QInt8,
            op_types_to_quantize=OPERATORS, nodes_to_exclude=of_activations,
            extra_options=dict(ActivationSymmetric=symmetric, OpTypesToExcludeOutputQuantization=OPERATORS))
    finally:
        logger.setLevel(level)


def give_own_inputs(graph) -> None:
    """Puts an Identity in front of each linear layer and convolution whose input others read too, in place.

    The quantizer replaces a tensor for all its readers: without this, a layer that reads the residual stream, as one
    behind a folded norm does, would put the stream itself into 8 bits. The runtime drops the Identity.

    Args:
        graph (onnx.GraphProto): in floating point.
    """
    from onnx import helper
    readers = Counter(name for node in graph.node for name in node.input)
    nodes = []
    for node in graph.node:
        name = node.input[0] if node.op_type in OPERATORS else ''
        if name and readers[name] > 1:
            node.input[0] = f'{name}_of_{node.name}'
            nodes.append(helper.make_node('Identity', [name], [node.input[0]], name=f'{node.name}_input'))
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
