"""INT8 files in ONNX Runtime and OpenVINO: how near they are, and what the runtimes make of them."""
from collections import Counter

import pytest
import torch
from torch import nn

from mmunorm.deploy.graphs import graph_of
from mmunorm.deploy.pictures import Samples
from mmunorm.utils import PreflightError

from .conftest import SHAPE, blurred, meta_of

for package in ('nncf', 'onnx', 'onnxscript', 'onnxruntime', 'openvino'):
    pytest.importorskip(package)

import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

from mmunorm.deploy import FORMATS, Runner, export_file
from mmunorm.deploy.formats.onnx import give_own_inputs, quantize_file


def test_samples(swin):
    batches = Samples(list(blurred(7)), meta_of(swin), 3)
    assert len(batches) == 2 and [batch[0].shape for batch in batches] == [(3, 3, *SHAPE)] * 2
    assert batches[1][0].dtype == 'float32' and np.array_equal(batches[1][0], blurred(7)[3:6].numpy())
    with pytest.raises(PreflightError, match='got 7 for --batch 8'):
        Samples(list(blurred(7)), meta_of(swin), 8)


def signal_to_noise(model, path):
    """Of the logarithms of probabilities, in dB, on pictures that the ranges were not taken from."""
    images = blurred(6, seed=1).float()
    with torch.no_grad():
        exact = graph_of(model)(images).log()
    got = torch.from_numpy(Runner(path)(images.numpy())['scores']).log()
    exact, got = (each - each.mean(1, keepdim=True) for each in (exact, got))
    return (10 * torch.log10(exact.square().sum() / (got - exact).square().sum())).item()


def count(model, kind):
    return sum(isinstance(module, kind) for module in model.modules())


@pytest.mark.slow
def test_openvino(swin, exportable, tmp_path):
    made = export_file(exportable, FORMATS['openvino'], tmp_path / 'm.xml', int8='static',
                       samples=Samples(list(blurred()), exportable.meta, 2))
    assert signal_to_noise(swin, made.path) > 20
    executed = [[op.get_rt_info()[key].astype(str) for key in ('layerType', 'runtimePrecision')]
                for op in openvino.Core().compile_model(made.path, 'CPU').get_runtime_model().get_ops()]
    layers = [precision for kind, precision in executed if kind in ('Convolution', 'FullyConnected')]
    assert len(layers) == count(swin, (nn.Conv2d, nn.Linear)) and {*layers} <= {'i8', 'u8'}
    assert not any(kind == 'MVN' for kind, _ in executed)


def test_onnx_runtime_computes_in_integers(swin, exportable, tmp_path):
    """Every linear layer is an integer kernel, and nothing else is in 8 bits."""
    made = export_file(exportable, FORMATS['onnx'], tmp_path / 'm.onnx', int8='static',
                       samples=Samples(list(blurred()), exportable.meta, 2))
    assert signal_to_noise(swin, made.path) > 20

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that the optimized file is for this machine
    options.optimized_model_filepath = str(tmp_path / 'executed.onnx')
    onnxruntime.InferenceSession(made.path, options, providers=['CPUExecutionProvider'])
    graph = onnx.load(tmp_path / 'executed.onnx').graph
    executed = Counter(node.op_type for node in graph.node)
    assert executed['MatMulIntegerToFloat'] + executed['QGemm'] == count(swin, nn.Linear)
    assert not executed['Gemm'] and not executed['DequantizeLinear']
    # The residual stream is not quantized, though a folded norm's layer reads it.
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    assert not [node.name for node in graph.node if node.op_type in ('Add', 'Mul')
                for name in node.input if 'Quant' in made_by.get(name, '')]


def graph_file(path, nodes, weights, shape):
    """A small network in floating point, from `x` to `y`."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ('x', 'y')]
    del values[1].type.tensor_type.shape.dim[:]
    values[1].type.tensor_type.ClearField('shape')
    graph = helper.make_graph(nodes, 'g', values[:1], values[1:],
                              [numpy_helper.from_array(array, name) for name, array in weights.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 20)], ir_version=10)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)


def run(path, x):
    return onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider']).run(None, dict(x=x))[0]


@pytest.mark.parametrize('shape', [(6, 32), (2, 6, 32), (2, 3, 2, 32)])
def test_a_bias_of_any_rank(shape, tmp_path):
    rng = np.random.default_rng(0)
    weights = dict(w=rng.normal(size=(32, 8)), b=10 + rng.normal(size=8))
    nodes = [helper.make_node('MatMul', ['x', 'w'], ['p'], name='product'),
             helper.make_node('Add', ['b', 'p'], ['y'], name='bias')]
    graph_file(tmp_path / 'f.onnx', nodes, {name: array.astype('f4') for name, array in weights.items()}, shape)
    x = rng.normal(size=shape).astype('f4')
    quantize_file(tmp_path / 'f.onnx', tmp_path / 'q.onnx', [dict(x=x)])
    expected = run(tmp_path / 'f.onnx', x)
    np.testing.assert_allclose(run(tmp_path / 'q.onnx', x), expected, atol=0.3)
    assert expected.shape == (*shape[:-1], 8)


def test_convolutions(tmp_path):
    """That of the pixels stays in float; others are integer kernels, what they write too."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(32, channels, 3, 3)).astype('f4') / 10
               for name, channels in (('pixels', 3), ('inner', 32))}
    nodes = [helper.make_node('Conv', ['x', 'pixels'], ['h'], name='first'),
             helper.make_node('Relu', ['h'], ['r'], name='relu'),
             helper.make_node('Conv', ['r', 'inner'], ['y'], name='second')]
    graph_file(tmp_path / 'f.onnx', nodes, weights, (1, 3, 12, 12))
    x = rng.normal(size=(1, 3, 12, 12)).astype('f4')
    quantize_file(tmp_path / 'f.onnx', tmp_path / 'q.onnx', [dict(x=x)])
    graph = onnx.load(tmp_path / 'q.onnx').graph
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    sources = {node.name: [made_by.get(name) for name in node.input[:2]] for node in graph.node
               if node.op_type == 'Conv'}
    assert sources == dict(first=[None, None], second=['DequantizeLinear'] * 2)
    assert made_by['y'] == 'DequantizeLinear'
    expected = run(tmp_path / 'f.onnx', x)
    error = np.square(run(tmp_path / 'q.onnx', x) - expected).mean() / np.square(expected).mean()
    assert error < 1e-3


def test_only_linear_layers_with_a_shared_input_get_one_of_their_own():
    nodes = [helper.make_node('Clip', ['x', '', 'm'], ['c'], name='clip'),  # '' is an input that is left out
             helper.make_node('Clip', ['c', '', 'm'], ['y'], name='again'),
             helper.make_node('MatMul', ['y', 'w'], ['z'], name='linear'),
             helper.make_node('MatMul', ['y', 'v'], ['u'], name='in_float'),
             helper.make_node('Add', ['u', 'z'], ['s'], name='sum'),
             helper.make_node('MatMul', ['s', 'w'], ['out'], name='last')]
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ('x', 'm', 'w', 'v', 'out')]
    graph = helper.make_graph(nodes, 'g', value[:4], value[4:])
    give_own_inputs(graph, {'in_float'})
    assert [(node.name, list(node.input)) for node in graph.node] == [
        ('clip', ['x', '', 'm']), ('again', ['c', '', 'm']), ('linear_input', ['y']), ('linear', ['y_of_linear', 'w']),
        ('in_float', ['y', 'v']), ('sum', ['u', 'z']), ('last', ['s', 'w'])]
