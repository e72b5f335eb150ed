"""Classifiers in ONNX and OpenVINO beside torch, in floating point and in INT8; and which format is chosen."""
import copy
import logging
import shutil
from collections import Counter

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms.functional import normalize, to_tensor

import mmunorm
from mmunorm.backbones.performer import PerformerAttention
from mmunorm.benchmark.subjects import Subject
from mmunorm.deploy.api import as_exportable
from mmunorm.deploy.formats import FORMATS, format_of, table
from mmunorm.deploy.formats.base import silent
from mmunorm.deploy.preprocessing import Samples
from mmunorm.utils import PreflightError

from ..fusion import models
from .conftest import (
    SHAPE,
    Beside,
    blurred,
    folded,
    graph_of,
    meta_of,
    needs,
    normalizing,
    operators_in,
    signal_to_noise,
    write,
)


def test_a_format_without_int8_says_so():
    plain = type('Plain', (type(FORMATS['onnx']), ), dict(name='plain', packages=(), int8_kinds=()))()
    with pytest.raises(PreflightError, match='--int8: plain has no INT8'):
        plain.check('', '--int8')
    assert plain.check() is None


def test_what_is_missing_is_named(monkeypatch):
    installed = []
    monkeypatch.setattr('mmunorm.deploy.formats.base.find_spec', lambda name: name in installed or None)
    monkeypatch.setattr(torch, '__version__', '2.8.1+cpu')
    with pytest.raises(PreflightError, match=r"^missing: onnx, onnxscript, openvino; install with pip install "
                                              r"'\.\[deploy\]' in a clone of mmunorm$"):
        FORMATS['openvino'].check()
    with pytest.raises(PreflightError, match="install with pip install --no-deps -r requirements/edge.txt in a clone"):
        FORMATS['executorch'].check()
    installed += ['onnx', 'onnxscript', 'openvino', 'onnxruntime']
    with pytest.raises(PreflightError, match='^missing: nncf;'):
        FORMATS['openvino'].check('static')
    with pytest.raises(PreflightError, match=r'^the exporter needs torch 2.9 or newer, but 2.8.1\+cpu'):
        FORMATS['onnx'].check('')
    monkeypatch.setattr(torch, '__version__', '2.10.0')
    assert FORMATS['onnx'].check('') == 'static' and FORMATS['onnx'].check() is None


def test_loggers_that_are_made_in_silence_work_later(capsys):
    handlers, logger = logging.root.handlers[:], logging.getLogger('made in silence')
    with silent():
        logger.addHandler(logging.StreamHandler())
        logging.root.addHandler(logging.StreamHandler())
    logger.warning('later')
    assert logging.root.handlers == handlers and 'Logging error' not in capsys.readouterr().err


def test_the_table():
    lines = table().splitlines()
    assert len(lines) == 1 + len(FORMATS)
    assert ['openvino', '.xml', 'OpenVINO', 'static'] in map(str.split, lines)
    assert [format_of(name).name for name in ('m.tflite', 'm.vela.tflite')] == ['litert', 'ethos-u']


def test_samples(swin):
    batches = Samples(list(blurred(7)), meta_of(swin), 3)
    assert len(batches) == 2 and [batch[0].shape for batch in batches] == [(3, 3, *SHAPE)] * 2
    assert batches[1][0].dtype == 'float32' and np.array_equal(batches[1][0], blurred(7)[3:6].numpy())
    with pytest.raises(PreflightError, match='got 7 for --batch 8'):
        Samples(list(blurred(7)), meta_of(swin), 8)


needs('onnx', 'openvino')

import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

from mmunorm.deploy import ExportedModel, prepare_export
from mmunorm.deploy.formats.onnx import OnnxSession, quantize_file, separate_inputs, store_as_half


def assert_runs(model, path, number, size, atol=2e-6):
    """The runtime computes what torch does, for other images than the exporter compares."""
    images = torch.rand(number, 3, *size) * 20 + 100
    with torch.no_grad():
        expected = graph_of(model)(images)
    assert expected.std() > 0.01
    got = torch.from_numpy(ExportedModel(path)(images.numpy())['scores'])
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize('name', ['onnx', 'openvino'])
def test_a_swin_and_its_weights_in_float16(swin, exportable, tmp_path, name):
    full = write(exportable, name, tmp_path)
    assert full.norms == 0 and full.difference.largest['scores'] < 2e-6
    assert full.size == sum(file.stat().st_size for file in tmp_path.iterdir()) > 10_000
    assert_runs(swin, full.path, 3, SHAPE)  # a batch that the file's size does not divide
    assert b'site-packages' not in full.path.read_bytes()  # nor other paths of this machine
    half = write(exportable, name, tmp_path / 'half', half=True)
    weights = [FORMATS[name].files(report.path)[-1].stat().st_size for report in (half, full)]
    assert weights[0] < weights[1]  # computed with in float32
    assert full.difference.largest['scores'] < half.difference.largest['scores'] < 5e-3


def test_a_photograph_reaches_the_network_as_torchvision_gives_it(swin, exportable, tmp_path):
    """In BGR as cv2 reads it, in a file whose network takes RGB."""
    photograph = np.random.default_rng(0).integers(0, 256, (*SHAPE, 3), dtype=np.uint8)
    Image.fromarray(photograph).save(tmp_path / 'a.png')
    inputs = normalize(to_tensor(photograph), [120 / 255] * 3, [60 / 255] * 3)[None]
    with torch.no_grad():
        expected = swin(inputs, mode='tensor').softmax(-1)[0]
    runner = ExportedModel(write(exportable, 'onnx', tmp_path).path)
    found = torch.from_numpy(runner.classify(cv2.imread(str(tmp_path / 'a.png'))))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (torch.from_numpy(runner.classify(photograph)) - expected).abs().max() > 1e-3


def count(model, kind):
    return sum(isinstance(module, kind) for module in model.modules())


@pytest.mark.slow
def test_openvino_computes_in_integers(swin, exportable, tmp_path):
    path = write(exportable, 'openvino', tmp_path, 'static').path
    assert signal_to_noise(swin, path) > 20
    how = {'INFERENCE_PRECISION_HINT': 'f32'}  # as the package opens it; else a CPU with AMX takes bfloat16 for floats
    executed = [[op.get_rt_info()[key].astype(str) for key in ('layerType', 'runtimePrecision')]
                for op in openvino.Core().compile_model(path, 'CPU', how).get_runtime_model().get_ops()]
    layers = [precision for kind, precision in executed if kind in ('Convolution', 'FullyConnected')]
    assert len(layers) == count(exportable.graph, (nn.Conv2d, nn.Linear)) and {*layers} <= {'i8', 'u8'}
    assert not any(kind == 'MVN' for kind, _ in executed)


def executed_by_onnx_runtime(path):
    """The graph that it makes of a file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that the optimized file is for this machine
    options.optimized_model_filepath = str(path.with_name('executed.onnx'))
    onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
    return onnx.load(options.optimized_model_filepath).graph


def test_onnx_runtime_computes_in_integers(swin, exportable, tmp_path):
    """Every linear layer is an integer kernel, and nothing else is in 8 bits."""
    path = write(exportable, 'onnx', tmp_path, 'static').path
    assert signal_to_noise(swin, path) > 20
    graph = executed_by_onnx_runtime(path)
    executed = Counter(node.op_type for node in graph.node)
    assert executed['MatMulIntegerToFloat'] + executed['QGemm'] == count(exportable.graph, nn.Linear)
    assert not executed['Gemm'] and not executed['DequantizeLinear']
    # The residual stream is not quantized, though a folded norm's layer reads it.
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    assert not [node.name for node in graph.node if node.op_type in ('Add', 'Mul')
                for name in node.input if 'Quant' in made_by.get(name, '')]


def test_a_benchmark_measures_no_file_that_is_wrong(swin, exportable, tmp_path, monkeypatch):
    run = OnnxSession.run
    monkeypatch.setattr(OnnxSession, 'run', lambda self, arrays: [out**1.01 for out in run(self, arrays)])
    monkeypatch.setattr('mmunorm.benchmark.subjects.prepare_export', lambda *_: exportable)  # has a program
    subject = Subject('swin', swin, meta_of(swin), 2, tmp_path / 'files', 1)
    with pytest.raises(PreflightError, match='computes something else than ImageClassifier'):
        subject.export('onnx')


@pytest.mark.slow
def test_ranges_of_openvino_do_not_depend_on_the_batch(tmp_path):
    """NNCF's default is the mean over batches, which clips most of single images that differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(256, 64), nn.GELU(),
                          nn.Linear(64, 10)).eval()
    images = torch.randn(32, 3, 16, 16) * torch.linspace(0.2, 3, 32)[torch.randperm(32)].view(-1, 1, 1, 1)
    snr = []
    for batch in (1, 16):
        mmunorm.export(model, images[:batch], tmp_path / 'm.xml', 'static', images)
        snr.append(mmunorm.compare(tmp_path / 'm.xml', model, images).snr['output'])
    assert snr[0] == pytest.approx(snr[1], abs=0.5) and snr[0] > 25


def test_what_float16_cannot_hold_stays(tmp_path):
    big, small, vector = (numpy_helper.from_array(np.full(shape, value, np.float32), name)
                          for name, shape, value in (('a', (2, 2), 7e4), ('b', (2, 2), 0.1), ('c', (2, ), 1.)))
    graph = helper.make_graph([helper.make_node('Sum', ['a', 'b', 'c'], ['y'])], 'g', [],
                              [helper.make_tensor_value_info('y', TensorProto.FLOAT, [2, 2])], [big, small, vector])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid('', 18)], ir_version=8), tmp_path / 'm.onnx')
    store_as_half(tmp_path / 'm.onnx')
    kinds = {tensor.name: tensor.data_type for tensor in onnx.load(tmp_path / 'm.onnx').graph.initializer}
    assert kinds == {'a': TensorProto.FLOAT, 'b_half': TensorProto.FLOAT16, 'c': TensorProto.FLOAT}
    out, = onnxruntime.InferenceSession(tmp_path / 'm.onnx').run(None, {})
    assert out[0, 0] == np.float32(7e4) + np.float32(np.float16(0.1)) + 1


class Attention(nn.Module):

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        query = x.flatten(2).unflatten(1, (2, -1))
        return nn.functional.scaled_dot_product_attention(query, 2 * query, -query, **self.options).reshape(x.shape)


@pytest.mark.parametrize('options, muls', [
    (({}, dict(scale=0.3), dict(attn_mask=torch.eye(8))), 2), ((dict(is_causal=True), ), 3)])  # one Mul is the key's
def test_attention_is_few_operators_for_compilers_of_chips(options, muls, tmp_path):
    attentions = nn.Sequential(*(Attention(**each) for each in options))
    report = write(as_exportable(attentions, torch.randn(1, 16, 4, 4)), 'onnx', tmp_path)
    kinds = operators_in(report.path)
    assert report.difference.largest['output'] < 1e-6
    assert kinds['Mul'] == muls * len(options) and kinds['Transpose'] == len(options)


def test_gelu_is_operators_that_compilers_of_chips_know(tmp_path):
    layers, x = Beside({kind: nn.GELU(approximate=kind) for kind in ('none', 'tanh')}), torch.linspace(-6, 6, 48)
    report = write(as_exportable(layers, x.view(1, 3, 4, 4)), 'onnx', tmp_path)
    assert onnx.load(report.path).opset_import[0].version == 18 and 'Gelu' not in operators_in(report.path)
    assert len(report.difference.largest) == 2 and max(report.difference.largest.values()) < 1e-6


def test_a_vit_with_its_norms_for_any_number(tmp_path):
    """Its size is fixed. LayerNorm is a node of its own."""
    arch = dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=24)
    model = normalizing(models.vit_classifier(dict(type='LN'), arch=arch))
    exportable = prepare_export(model, meta_of(model, (32, 32)), dynamic=True)
    assert exportable.meta['shape'] == [None, 3, 32, 32]
    report = write(exportable, 'onnx', tmp_path)
    assert operators_in(report.path)['LayerNormalization'] == report.norms == 3
    for number in (1, 3):
        assert_runs(model, report.path, number, (32, 32))


@pytest.mark.parametrize('name', ['onnx', pytest.param('openvino', marks=pytest.mark.slow)])
def test_a_swin_for_any_number(swin, tmp_path, name):
    report = write(prepare_export(swin, meta_of(swin), dynamic=True), name, tmp_path)
    for number in (1, 3):
        assert_runs(swin, report.path, number, SHAPE)


@pytest.fixture(scope='module')
def performers():
    """A folded T2T-ViT for 32 x 32 whose Performers have queries and keys so long that some attend to nothing."""
    torch.manual_seed(2)  # 33 dB in OpenVINO, and 23 with exponents in INT8; other seeds are closer
    model, _ = folded(lambda: models.t2t_classifier(num_layers=1))
    for module in model.modules():
        if isinstance(module, PerformerAttention):
            module.kqv.weight.data *= 2
    return model, prepare_export(model, meta_of(model, (32, 32)), 2)


@pytest.mark.slow
@pytest.mark.parametrize('name, int8, least', [
    ('onnx', None, 90), ('openvino', None, 90), ('onnx', 'static', 25), ('openvino', 'static', 25),
    ('litert', 'dynamic', 15), ('litert', 'products', 15), ('litert', None, 90)])
def test_a_performer_that_attends_to_nothing(performers, tmp_path, name, int8, least):
    """The exporter once dropped the `eps` of its quotient: NaN in place of 0. In INT8 its exponents stay exact."""
    needs(name)
    model, exportable = performers
    report = write(exportable, name, tmp_path, int8)
    assert report.norms == 0 and signal_to_noise(model, report.path, (32, 32)) > least


def test_operators_without_an_integer_kernel_are_named_before_files_are_compared(performers, tmp_path, monkeypatch):
    needs('litert')
    monkeypatch.setattr('mmunorm.deploy.formats.litert.mean_snr', None)
    with pytest.raises(PreflightError, match='these operators have no integer kernel: .*EXP 4'):
        write(performers[1], 'litert', tmp_path, 'full')


def test_a_head_of_another_kind_is_refused(swin):
    other = copy.deepcopy(swin)
    other.head.__class__ = type('OwnHead', (type(other.head), ), dict(_get_predictions=None))
    with pytest.raises(PreflightError, match='OwnHead'):
        graph_of(other)
    other = copy.copy(swin)
    other.__class__ = type('OwnClassifier', (type(swin), ), dict(predict=lambda self: None))
    with pytest.raises(PreflightError, match='OwnClassifier cannot be exported: it has a predict of its own'):
        graph_of(other)


def quantized(folder, nodes, weights, shape):
    """A small network from `x` to `y`: what it computes in floating point and in INT8, and the graph of that file."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ('x', 'y')]
    del values[1].type.tensor_type.shape.dim[:]
    values[1].type.tensor_type.ClearField('shape')
    graph = helper.make_graph(nodes, 'g', values[:1], values[1:],
                              [numpy_helper.from_array(array.astype('f4'), name) for name, array in weights.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 20)], ir_version=10)
    onnx.save(onnx.shape_inference.infer_shapes(model), folder / 'f.onnx')
    x = np.random.default_rng(1).normal(size=shape).astype('f4')
    shutil.copy(folder / 'f.onnx', folder / 'q.onnx')
    quantize_file(folder / 'q.onnx', [dict(x=x)])
    sessions = (onnxruntime.InferenceSession(folder / name, providers=['CPUExecutionProvider'])
                for name in ('f.onnx', 'q.onnx'))
    return *(session.run(None, dict(x=x))[0] for session in sessions), onnx.load(folder / 'q.onnx').graph


@pytest.mark.parametrize('shape', [(6, 32), (2, 6, 32), (2, 3, 2, 32)])
def test_a_bias_of_any_rank(shape, tmp_path):
    rng = np.random.default_rng(0)
    weights = dict(w=rng.normal(size=(32, 8)), b=10 + rng.normal(size=8))
    nodes = [helper.make_node('MatMul', ['x', 'w'], ['p'], name='product'),
             helper.make_node('Add', ['b', 'p'], ['y'], name='bias')]
    expected, got, _ = quantized(tmp_path, nodes, weights, shape)
    np.testing.assert_allclose(got, expected, atol=0.3)
    assert expected.shape == (*shape[:-1], 8)


def test_layers_with_equal_biases(tmp_path):
    """The exporter keeps equal values once; those of an untrained model are all zero."""
    rng = np.random.default_rng(0)
    weights = dict(w=rng.normal(size=(32, 32)), v=rng.normal(size=(32, 32)), b=rng.normal(size=32))
    nodes = [helper.make_node('MatMul', ['x', 'w'], ['p'], name='first'),
             helper.make_node('Add', ['p', 'b'], ['h'], name='first_bias'),
             helper.make_node('Relu', ['h'], ['r'], name='relu'),
             helper.make_node('MatMul', ['r', 'v'], ['q'], name='second'),
             helper.make_node('Add', ['q', 'b'], ['y'], name='second_bias')]
    expected, got, _ = quantized(tmp_path, nodes, weights, (2, 6, 32))
    assert np.square(got - expected).mean() / np.square(expected).mean() < 1e-3
    executed = Counter(node.op_type for node in executed_by_onnx_runtime(tmp_path / 'q.onnx').node)
    assert executed['MatMulIntegerToFloat'] == 2 and not executed['Gemm']


def test_convolutions(tmp_path):
    """That of the pixels stays in float; others are integer kernels, what they write too."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(32, channels, 3, 3)) / 10 for name, channels in (('pixels', 3), ('inner', 32))}
    nodes = [helper.make_node('Conv', ['x', 'pixels'], ['h'], name='first'),
             helper.make_node('Relu', ['h'], ['r'], name='relu'),
             helper.make_node('Conv', ['r', 'inner'], ['y'], name='second')]
    expected, got, graph = quantized(tmp_path, nodes, weights, (1, 3, 12, 12))
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    sources = {node.name: [made_by.get(name) for name in node.input[:2]] for node in graph.node
               if node.op_type == 'Conv'}
    assert sources == dict(first=[None, None], second=['DequantizeLinear'] * 2)
    assert made_by['y'] == 'DequantizeLinear'
    assert np.square(got - expected).mean() / np.square(expected).mean() < 1e-3


def test_only_linear_layers_with_a_shared_input_get_one_of_their_own():
    nodes = [helper.make_node('Clip', ['x', '', 'm'], ['c'], name='clip'),  # '' is an input that is left out
             helper.make_node('Clip', ['c', '', 'm'], ['y'], name='again'),
             helper.make_node('MatMul', ['y', 'w'], ['z'], name='linear'),
             helper.make_node('MatMul', ['y', 'v'], ['u'], name='in_float'),
             helper.make_node('Add', ['u', 'z'], ['s'], name='sum'),
             helper.make_node('MatMul', ['s', 'w'], ['out'], name='last')]
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ('x', 'm', 'w', 'v', 'out')]
    graph = helper.make_graph(nodes, 'g', value[:4], value[4:])
    separate_inputs(graph, {'in_float'})
    assert [(node.name, list(node.input)) for node in graph.node] == [
        ('clip', ['x', '', 'm']), ('again', ['c', '', 'm']), ('linear_input', ['y']), ('linear', ['y_of_linear', 'w']),
        ('in_float', ['y', 'v']), ('sum', ['u', 'z']), ('last', ['s', 'w'])]


def test_weights_have_seven_of_their_eight_bits(tmp_path):
    """Without VNNI, a CPU adds two products in 16 bits, where 8 bits of weights and activations can overflow."""
    rng = np.random.default_rng(0)
    weights = dict(w=rng.normal(size=(32, 32)), c=rng.normal(size=(8, 32, 1, 1)))
    for name, nodes, shape in (('w', [helper.make_node('MatMul', ['x', 'w'], ['y'], name='product')], (2, 6, 32)),
                               ('c', [helper.make_node('Conv', ['x', 'c'], ['y'], name='conv')], (1, 32, 4, 4))):
        *_, graph = quantized(tmp_path, nodes, {name: weights[name]}, shape)
        stored, = (numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.dims == [
            *weights[name].shape])
        assert stored.dtype == np.int8 and 60 < np.abs(stored.astype(int)).max() <= 64
