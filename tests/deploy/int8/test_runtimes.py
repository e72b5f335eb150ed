"""INT8 files in ONNX Runtime and OpenVINO: how near they are, and what the runtimes make of them."""
import pytest
import torch
from torch import nn

from mmunorm import fuse_norms
from mmunorm.deploy.graphs import graph_of
from mmunorm.deploy.int8 import apply_forms, choose_forms
from mmunorm.deploy.int8.forms import ScaleShift

for package in ('nncf', 'onnx', 'onnxscript', 'onnxruntime', 'openvino'):
    pytest.importorskip(package)

import onnx
from onnx import TensorProto, helper, numpy_helper

from mmunorm.deploy import FORMATS, Runner, save, trace
from mmunorm.deploy.int8.onnx import give_own_inputs, quantize
from mmunorm.deploy.int8.openvino import kernels

from . import models


@pytest.fixture(scope='module')
def subject():
    """A Swin with two large channels, its kept norms, and its graph for two pictures."""
    model = models.classifier(100.)
    forms = choose_forms(model, models.samples())
    apply_forms(model, forms)
    meta = dict(task='classifier', model='Swin', classes=['a'], steps=[], divisor=4, bgr=True,
                shape=[1, 3, *models.SHAPE], norms=[form.norm for form in forms])
    return model, trace(model, meta, 2)


def signal_to_noise(model, path):
    """Of the logarithms of probabilities, in dB, on pictures that the ranges were not taken from."""
    images = models.pictures(6, seed=1).float()
    with torch.no_grad():
        exact = graph_of(model)(images).log()
    got = torch.from_numpy(Runner(path)(images.numpy())['scores']).log()
    exact, got = (each - each.mean(1, keepdim=True) for each in (exact, got))
    return (10 * torch.log10(exact.square().sum() / (got - exact).square().sum())).item()


def linear_layers(model):
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))]


@pytest.mark.slow
def test_openvino(subject, tmp_path):
    model, traced = subject
    made = save(traced, FORMATS['openvino'], tmp_path / 'm.xml', samples=models.samples())
    assert signal_to_noise(model, made.path) > 20
    assert Runner(made.path).meta['norms'] == traced.meta['norms']

    executed = kernels(Runner(made.path)._session.compiled)
    layers = [kernel for kernel in executed if kernel.kind in ('Convolution', 'FullyConnected')]
    assert all(kernel.is_int8 for kernel in layers) and len(layers) == len(linear_layers(model))
    assert not any(kernel.kind == 'MVN' for kernel in executed)
    # A kept norm that reads a residual addition is in the kernel of that addition, with the quantizer behind it.
    nodes = {name: node_names(traced, name) for name, module in model.named_modules() if isinstance(module, ScaleShift)}
    behind_addition = [names for name, names in nodes.items() if name.endswith('norm2')]
    assert behind_addition
    for names in behind_addition:
        kernel = next(kernel for kernel in executed if names <= set(kernel.nodes))
        assert any('fq' in node for node in kernel.nodes)
        assert any(node.startswith('node_add') and node not in names for node in kernel.nodes)


def node_names(traced, module):
    """Names of the nodes of a multiply and an add in a traced graph."""
    return {node.name for node in traced.program.model.graph
            if module in node.metadata_props.get('pkg.torch.onnx.name_scopes', '') and node.op_type in ('Add', 'Mul')}


@pytest.mark.parametrize('symmetric', [False, True])
def test_onnx(subject, symmetric, tmp_path):
    model, traced = subject
    traced.program.save(tmp_path / 'float.onnx', external_data=False)
    batches = [dict(images=images) for images, in models.samples()]
    quantize(tmp_path / 'float.onnx', tmp_path / 'm.onnx', batches, symmetric)
    graph = onnx.load(tmp_path / 'm.onnx').graph
    quantized = [node for node in graph.node if node.op_type == 'QuantizeLinear']
    made = {name: node.op_type for node in graph.node for name in node.output}
    linear = [node for node in graph.node if node.op_type in ('Conv', 'Gemm', 'MatMul')
              and made.get(node.input[1]) == 'DequantizeLinear']
    assert len(linear) == len(linear_layers(model))
    assert all(made[node.input[0]] == 'DequantizeLinear' for node in linear)
    # The residual stream stays as it is, where a folded norm's layer reads it too.
    assert not [node.name for node in graph.node if node.op_type in ('Add', 'Mul')
                for name in node.input if made.get(name) == 'DequantizeLinear']
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    zeros = [constants[node.input[2]] for node in quantized]
    assert {zero.dtype.name for zero in zeros} == {'int8' if symmetric else 'uint8'}
    assert all((zero == 0).all() for zero in zeros) == symmetric


def test_only_linear_layers_with_a_shared_input_get_one_of_their_own():
    nodes = [helper.make_node('Clip', ['x', '', 'm'], ['c'], name='clip'),  # '' is an input that is left out
             helper.make_node('Clip', ['c', '', 'm'], ['y'], name='again'),
             helper.make_node('MatMul', ['y', 'w'], ['z'], name='linear'),
             helper.make_node('Add', ['y', 'z'], ['s'], name='sum'),
             helper.make_node('MatMul', ['s', 'w'], ['out'], name='last')]
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ('x', 'm', 'w', 'out')]
    graph = helper.make_graph(nodes, 'g', value[:3], value[3:])
    give_own_inputs(graph)
    assert [(node.name, list(node.input)) for node in graph.node] == [
        ('clip', ['x', '', 'm']), ('again', ['c', '', 'm']), ('linear_input', ['y']), ('linear', ['y_of_linear', 'w']),
        ('sum', ['y', 'z']), ('last', ['s', 'w'])]


@pytest.mark.slow
def test_onnx_runtime(subject, tmp_path):
    model, traced = subject
    made = save(traced, FORMATS['onnx'], tmp_path / 'm.onnx', samples=models.samples())
    assert signal_to_noise(model, made.path) > 20
    assert Runner(made.path).meta['norms'] == traced.meta['norms']
    folded = models.classifier(100.)
    fuse_norms(folded, strict=True)
    worse = save(trace(folded, traced.meta, 2), FORMATS['onnx'], tmp_path / 'folded.onnx', samples=models.samples())
    assert signal_to_noise(folded, worse.path) < signal_to_noise(model, made.path) - 5
