"""Cross-layer equalization of the residual streams in a LiteRT file before quantization.

With per-tensor quantization, all channels of a tensor share one step size, so a channel with large values leaves few
levels to the others. After folding, only linear layers and convolutions consume a stream. So each channel c can be
divided by a factor `s_c > 0` in the layers that produce it and multiplied by it in its consumers, without changing the
function. LayerNorm normalizes over all channels of a token, so factors cannot be moved past it.

    s_c = (max |x_c|)^0.75,    the largest value over all tensors of the stream and some training images.

With an exponent below 1, part of the difference remains in the activations, because equalizing the stream makes the
weights of its consumers less equal.
"""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .tflite import changed, kind_of

# Operators that move, add or average values, or take their maximum, without mixing channels.
_KEEP_CHANNELS = ('ADD', 'SUB', 'RESHAPE', 'TRANSPOSE', 'SLICE', 'STRIDED_SLICE', 'CONCATENATION', 'PAD', 'MEAN', 'SUM',
                  'AVERAGE_POOL_2D', 'MAX_POOL_2D', 'RELU', 'RESIZE_NEAREST_NEIGHBOR', 'RESIZE_BILINEAR',
                  'BROADCAST_TO')
# The output and input axes of a weight. A depthwise convolution has several consecutive outputs for each input.
_LAYERS = {'FULLY_CONNECTED': (0, 1), 'CONV_2D': (0, 3), 'DEPTHWISE_CONV_2D': (3, 3)}
_FLOAT = 0  # of the schema's TensorType
POWER = 0.75
_RELU = 1  # of the schema's ActivationFunctionType; 0 is none


def equalize(path: Path, data: dict[str, list[dict[str, np.ndarray]]]) -> int:
    """Equalizes the residual streams of a floating-point file, in place.

    Args:
        path (Path): path of the file.
        data: for each signature, the inputs of some runs, by name. A signature without inputs is unchanged.

    Returns:
        int: the number of streams.
    """
    number = 0
    with changed(path) as file:
        signatures = {each.subgraphIndex: each.signatureKey.decode() for each in file.signatureDefs}
        for index, graph in enumerate(file.subgraphs):
            streams = _Graph(file, graph).streams() if signatures[index] in data else []
            number += len(streams)
            for stream, largest in zip(streams, _largest(path, signatures[index], index, data, streams), strict=True):
                factors = np.maximum(largest, largest.max() * 1e-3)**POWER
                stream.scale(factors / np.exp(np.log(factors).mean()))
    return number


def _largest(path: Path, signature: str, index: int, data: dict, streams: Sequence[_Stream]) -> list[np.ndarray]:
    """The largest absolute value of each channel of each stream, over the runs of a signature."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType
    largest = [np.full(stream.channels, 1e-6) for stream in streams]
    if not streams:
        return largest
    # The intermediate tensors of XNNPACK's partitions would not be accessible.
    interpreter = Interpreter(str(path), experimental_preserve_all_tensors=True,
                              experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    interpreter.allocate_tensors()
    run = interpreter.get_signature_runner(signature)
    for inputs in data[signature]:
        run(**inputs)
        for stream, values in zip(streams, largest, strict=True):
            for tensor, axis in stream.axes.items():
                found = np.abs(np.moveaxis(interpreter.get_tensor(tensor, index), axis, -1))
                np.maximum(values, found.reshape(-1, stream.channels).max(0), out=values)
    return largest


class _Graph:
    """One signature of a file, with the producer and consumers of each tensor."""

    def __init__(self, model, graph):
        self.model, self.graph = model, graph
        self.kind = {id(operator): kind_of(model, operator) for operator in graph.operators}
        self._holders = Counter(tensor.buffer for each in model.subgraphs for tensor in each.tensors)
        self.users = defaultdict(list)
        for operator in graph.operators:
            for tensor in {*operator.inputs, *operator.outputs}:
                self.users[tensor].append(operator)

    def shape(self, tensor: int) -> list[int]:
        return [int(side) for side in self.graph.tensors[tensor].shape]

    def data(self, tensor: int, dtype=np.float32) -> np.ndarray | None:
        """The values of a constant tensor in its shape; None for a computed tensor."""
        data = self.model.buffers[self.graph.tensors[tensor].buffer].data
        return None if data is None or not len(data) else np.frombuffer(bytes(data), dtype).reshape(self.shape(tensor))

    def is_shared(self, tensor: int) -> bool:
        """Whether other tensors share its buffer in the file."""
        return self._holders[self.graph.tensors[tensor].buffer] > 1

    def floats(self, tensors) -> list[int]:
        return [each for each in tensors if each >= 0 and self.graph.tensors[each].type == _FLOAT]

    def streams(self) -> list[_Stream]:
        """The streams whose producers and consumers are all layers."""
        streams, seen = [], set()
        for operator in self.graph.operators:
            for tensor in operator.outputs if self.kind[id(operator)] in _LAYERS else ():
                if tensor not in seen:
                    stream = _Stream(self)
                    if stream.grow(tensor):
                        streams.append(stream)
                    seen |= stream.axes.keys()
        return streams


class _Stream:
    """Tensors with the same channels.

    Attributes:
        axes: the channel axis of each.
        constants: the constant ones.
        channels: number of channels; an axis may repeat them several times.
    """

    def __init__(self, graph: _Graph):
        self._graph = graph
        self.axes: dict[int, int] = {}
        self.constants: dict[int, int] = {}
        self._writers, self._readers = [], []
        self.channels = 0

    def grow(self, tensor: int) -> bool:
        """Adds all tensors with the channels of a layer's output. Returns whether only layers use them."""
        graph, found = self._graph, {tensor: len(self._graph.shape(tensor)) - 1}
        todo = [tensor]
        fits = True
        while todo:
            tensor = todo.pop()
            axis = self.axes[tensor] = found[tensor]
            fits &= tensor not in graph.graph.inputs and tensor not in graph.graph.outputs
            for operator in graph.users[tensor]:
                kind = graph.kind[id(operator)]
                if kind in _LAYERS:
                    fits &= self._layer(operator, kind, tensor, axis)
                    continue
                others = self._others(operator, kind, tensor, axis) if kind in _KEEP_CHANNELS else None
                if others is None:
                    fits = False
                    continue
                for other, its_axis in others.items():
                    if other not in found:
                        todo.append(other)
                    fits &= found.setdefault(other, its_axis) == its_axis
        self.channels = math.gcd(*(graph.shape(each)[axis] for each, axis in self.axes.items()))
        for each in list(self.axes):
            if graph.data(each) is not None:
                self.constants[each] = self.axes.pop(each)
                fits &= not graph.is_shared(each)
        return fits

    def _layer(self, operator, kind: str, tensor: int, axis: int) -> bool:
        """Records a layer that consumes or produces a tensor. Returns whether channel factors can be folded into it."""
        graph, (x, *weights), (y, ) = self._graph, operator.inputs, operator.outputs
        if axis != len(graph.shape(tensor)) - 1 or tensor in weights:
            return False
        weights = [each for each in weights if each >= 0]
        if any(graph.data(each) is None or graph.is_shared(each) or len(graph.users[each]) > 1 for each in weights):
            return False
        if tensor == y:
            self._writers.append((kind, weights))
            return operator.builtinOptions.fusedActivationFunction <= _RELU
        self._readers.append((kind, weights[0], graph.shape(x)[-1]))
        return True

    def _others(self, operator, kind: str, tensor: int, axis: int) -> dict[int, int] | None:
        """The other tensors of an operator with their channel axes; None if it mixes channels."""
        graph, y = self._graph, operator.outputs[0]
        if getattr(operator.builtinOptions, 'fusedActivationFunction', 0) > _RELU:
            return None
        own, others = graph.shape(tensor), {}
        for other in graph.floats({*operator.inputs, y} - {tensor}):
            shape = graph.shape(other)
            if kind == 'RESHAPE':
                inner = math.prod(own[axis + 1:])
                its_axis = next((each for each in range(len(shape)) if math.prod(shape[each + 1:]) == inner
                                 and not max(shape[each], own[axis]) % min(shape[each], own[axis])), None)
            elif kind == 'TRANSPOSE':
                order = list(graph.data(operator.inputs[1], np.int32))
                its_axis = order[axis] if tensor == y else order.index(axis)
            elif kind in ('MEAN', 'SUM'):
                axes = sorted({int(each) % len(graph.shape(operator.inputs[0]))
                               for each in graph.data(operator.inputs[1], np.int32).flatten()})
                kept = [each for each in range(len(graph.shape(operator.inputs[0]))) if each not in axes]
                if len(own) == len(shape):  # the axes are still there, with one element
                    its_axis = axis if axis in kept else None
                elif tensor == y:
                    its_axis = kept[axis]
                else:
                    its_axis = kept.index(axis) if axis in kept else None
            else:  # aligned at the right
                its_axis = axis - len(own) + len(shape)
            if its_axis is None or its_axis < 0 or kind != 'RESHAPE' and shape[its_axis] != own[axis]:
                return None
            others[other] = its_axis
        return others

    def scale(self, factors: np.ndarray) -> None:
        """Divides channel c by `factors[c]` in its producers, and multiplies by it in its consumers."""
        for tensor, axis in self.constants.items():
            self._multiply(tensor, 1 / factors, axis)
        for kind, (weight, *biases) in self._writers:
            self._multiply(weight, 1 / factors, _LAYERS[kind][0])
            for bias in biases:
                self._multiply(bias, 1 / factors, -1)
        for kind, weight, channels in self._readers:
            own, shape = np.tile(factors, channels // self.channels), self._graph.shape(weight)
            if kind == 'DEPTHWISE_CONV_2D':
                own = own.repeat(shape[-1] // channels)
            elif shape[-1] < channels:  # a grouped convolution, whose outputs read the channels of their group
                groups = channels // shape[-1]
                own = own.reshape(groups, 1, 1, shape[-1]).repeat(shape[0] // groups, 0)
                self._set(weight, self._graph.data(weight) * own)
                continue
            self._multiply(weight, own, _LAYERS[kind][1])

    def _multiply(self, tensor: int, factors: np.ndarray, axis: int) -> None:
        graph = self._graph
        values = np.moveaxis(graph.data(tensor).astype(np.float64), axis, -1)
        values = values * np.tile(factors, values.shape[-1] // len(factors))
        self._set(tensor, np.moveaxis(values, -1, axis))

    def _set(self, tensor: int, values: np.ndarray) -> None:
        graph = self._graph
        values = np.ascontiguousarray(values, np.float32).reshape(-1)
        graph.model.buffers[graph.graph.tensors[tensor].buffer].data = values.view(np.uint8)
