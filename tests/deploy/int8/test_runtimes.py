"""INT8 files in ONNX Runtime and OpenVINO: how near they are, and what the runtimes make of them."""
from collections import Counter

import pytest
import torch
from torch import nn

from mmunorm import fuse_norms
from mmunorm.deploy.graphs import graph_of

for package in ('nncf', 'onnx', 'onnxscript', 'onnxruntime', 'openvino'):
    pytest.importorskip(package)

import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

from mmunorm.deploy import FORMATS, Runner, save, trace
from mmunorm.deploy.int8.onnx import give_own_inputs, quantize
from mmunorm.deploy.int8.openvino import kernels

from . import models


@pytest.fixture(scope='module')
def subject():
    """A folded Swin, and its graph for two pictures."""
    model = models.classifier()
    fuse_norms(model, strict=True)
    meta = dict(task='classifier', model='Swin', classes=['a'], steps=[], divisor=4, bgr=True,
                shape=[1, 3, *models.SHAPE])
    return model, trace(model, meta, 2)


def signal_to_noise(model, path):
    """Of the logarithms of probabilities, in dB, on pictures that the ranges were not taken from."""
    images = models.pictures(6, seed=1).float()
    with torch.no_grad():
        exact = graph_of(model)(images).log()
    got = torch.from_numpy(Runner(path)(images.numpy())['scores']).log()
    exact, got = (each - each.mean(1, keepdim=True) for each in (exact, got))
    return (10 * torch.log10(exact.square().sum() / (got - exact).square().sum())).item()


def count(model, kind):
    return sum(isinstance(module, kind) for module in model.modules())


@pytest.mark.slow
def test_openvino(subject, tmp_path):
    model, traced = subject
    made = save(traced, FORMATS['openvino'], tmp_path / 'm.xml', samples=models.samples())
    assert signal_to_noise(model, made.path) > 20
    executed = kernels(openvino.Core().compile_model(made.path, 'CPU'))
    layers = [kernel for kernel in executed if kernel.kind in ('Convolution', 'FullyConnected')]
    assert all(kernel.is_int8 for kernel in layers) and len(layers) == count(model, (nn.Conv2d, nn.Linear))
    assert not any(kernel.kind == 'MVN' for kernel in executed)


def test_onnx_runtime_computes_in_integers(subject, tmp_path):
    """Every linear layer is an integer kernel, and nothing else is in 8 bits."""
    model, traced = subject
    made = save(traced, FORMATS['onnx'], tmp_path / 'm.onnx', samples=models.samples())
    assert signal_to_noise(model, made.path) > 20

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that the optimized file is for this machine
    options.optimized_model_filepath = str(tmp_path / 'executed.onnx')
    onnxruntime.InferenceSession(made.path, options, providers=['CPUExecutionProvider'])
    graph = onnx.load(tmp_path / 'executed.onnx').graph
    executed = Counter(node.op_type for node in graph.node)
    assert executed['MatMulIntegerToFloat'] + executed['QGemm'] == count(model, nn.Linear)
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
    quantize(tmp_path / 'f.onnx', tmp_path / 'q.onnx', [dict(x=x)])
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
    quantize(tmp_path / 'f.onnx', tmp_path / 'q.onnx', [dict(x=x)])
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
