"""INT8 with ONNX Runtime's own quantizer."""
from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

# Not Add and Mul, whose default would put the residual stream into 8 bits.
OPERATORS = ['Conv', 'Gemm', 'MatMul']
# Convolutions that sum over fewer channels stay in float: they read pixels, or each channel alone, and cost little.
LEAST_CHANNELS = 32


def quantize(source: str | Path, path: str | Path, inputs: Iterable[dict[str, np.ndarray]]) -> None:
    """Writes an ONNX file in INT8, with QuantizeLinear and DequantizeLinear around what is quantized.

    ONNX Runtime computes it with its integer kernels: linear layers write floating point, convolutions 8 bits, because
    its kernel for them cannot do otherwise. Weights have 7 of their 8 bits, for CPUs without VNNI; products of two
    activations stay in floating point.

    Args:
        source: the file in floating point.
        path: the file to write.
        inputs: batches of the model's inputs, by their names.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    model = onnx.load(source)
    in_float = _in_float(model.graph)
    give_own_inputs(model.graph, in_float)
    keep_products(model.graph)

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
            model, path, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, reduce_range=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, op_types_to_quantize=OPERATORS,
            nodes_to_exclude=sorted(in_float),
            extra_options=dict(OpTypesToExcludeOutputQuantization=['Gemm', 'MatMul']))
    finally:
        logger.setLevel(level)


def _in_float(graph) -> set[str]:
    """Names of the nodes that are not to be quantized."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    return {node.name for node in graph.node
            if node.op_type == 'MatMul' and node.input[1] not in weights
            or node.op_type == 'Conv' and weights[node.input[1]].dims[1] < LEAST_CHANNELS}


def give_own_inputs(graph, in_float: Iterable[str] = ()) -> None:
    """Puts an Identity before each linear layer and convolution whose input others read too, in place.

    The quantizer replaces a tensor for all its readers: without this, a layer that reads the residual stream, as one
    after a folded norm does, would put the stream itself into 8 bits. The runtime drops the Identity.

    Args:
        graph (onnx.GraphProto): in floating point.
        in_float (Iterable[str]): names of the nodes that stay as they are. Defaults to none.
    """
    from onnx import helper
    readers = Counter(name for node in graph.node for name in node.input)
    nodes = []
    for node in graph.node:
        name = node.input[0] if node.op_type in OPERATORS and node.name not in in_float else ''
        if name and readers[name] > 1:
            node.input[0] = f'{name}_of_{node.name}'
            nodes.append(helper.make_node('Identity', [name], [node.input[0]], name=f'{node.name}_input'))
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def keep_products(graph) -> None:
    """Gives the bias that is added to a product of three or more dimensions the shape `(1, 1, C)`, in place.

    ONNX Runtime makes one Gemm of a MatMul and an Add whose bias is `(C, )`, before it looks for quantizers, and has
    no integer kernel for a Gemm with a bias in floating point: it dequantizes the weights in every run, and is slower
    than without INT8. A MatMul of its own becomes a MatMulIntegerToFloat.

    Args:
        graph (onnx.GraphProto): in floating point, with the shapes of its values.
    """
    made = {name: node for node in graph.node for name in node.output}
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.value_info}
    readers = Counter(name for node in graph.node for name in node.input)
    biases = {tensor.name: tensor for tensor in graph.initializer
              if len(tensor.dims) == 1 and readers[tensor.name] == 1}
    for node in graph.node:
        if node.op_type != 'Add':
            continue
        for product, bias in (node.input, node.input[::-1]):
            if bias in biases and product in made and made[product].op_type == 'MatMul' and ranks.get(product, 0) > 2:
                biases[bias].dims[:] = [1, 1, biases[bias].dims[-1]]
    for value in [value for value in graph.value_info if value.name in biases]:
        graph.value_info.remove(value)  # with the old shape
