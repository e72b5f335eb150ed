"""Classifiers in ONNX Runtime and OpenVINO beside torch."""
import copy

import numpy as np
import pytest
import torch

from mmunorm import fuse_norms
from mmunorm.utils import PreflightError

from ..fusion import models

for package in ('onnx', 'onnxscript', 'onnxruntime', 'openvino'):
    pytest.importorskip(package)

import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from mmunorm.deploy import FORMATS, Runner, save, trace
from mmunorm.deploy.graphs import graph_of
from mmunorm.deploy.saving import store_as_half
from mmunorm.enhancement import IAT, EnhancingPreprocessor


def meta_of(model, shape):
    detector = hasattr(model, 'roi_head')
    return dict(task='detector' if detector else 'classifier', model=type(model).__name__, classes=['a', 'b', 'c'],
                steps=[], divisor=4, bgr=True, shape=[1, 3, *shape], mask_threshold=0.5)


def classifier(make, fold=True):
    model = make()
    model.data_preprocessor.register_buffer('mean', torch.full((3, 1, 1), 120.), False)
    model.data_preprocessor.register_buffer('std', torch.full((3, 1, 1), 60.), False)
    model.data_preprocessor._enable_normalize = True
    models.randomize(model, gamma='none')
    if fold:
        fuse_norms(model, strict=True)
    return model


def swin(**kwargs):
    """One block without a shift, one with, and a patch merging between them."""
    return models.swin_classifier(arch=dict(embed_dims=8, depths=[1, 2], num_heads=[2, 4]), **kwargs)


@pytest.fixture(scope='module')
def plain():
    """A folded Swin and its graph for two pictures of one size, which windows pad."""
    model = classifier(swin)
    return model, trace(model, meta_of(model, (37, 45)), 2)


@pytest.fixture(scope='module')
def open_swin():
    """A folded Swin and its graph for pictures of any size; of one stage, because such a graph takes long to trace."""
    model = classifier(lambda: models.classifier(models.swin_backbone(
        arch=dict(embed_dims=8, depths=[2], num_heads=[2]), out_indices=(0, )), 8))
    return model, trace(model, meta_of(model, (32, 32)), dynamic=True)


def assert_runs(model, path, number, size, atol=2e-6):
    """The runtime gives what torch gives, for other pictures than the exporter compares."""
    images = torch.rand(number, 3, *size) * 20 + 100
    with torch.no_grad():
        expected = graph_of(model)(images)
    assert expected.std() > 0.01
    got = torch.from_numpy(Runner(path)(images.numpy())['scores'])
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize('name', ['onnx', 'openvino'])
def test_a_swin(plain, tmp_path, name):
    model, traced = plain
    report = save(traced, FORMATS[name], tmp_path / f'm{FORMATS[name].suffix}')
    assert report.norms == 0 and report.difference.largest['scores'] < 2e-6
    assert report.size == sum(file.stat().st_size for file in tmp_path.iterdir()) > 10_000
    assert_runs(model, report.path, 3, (37, 45))  # a batch that the file's size does not divide


@pytest.mark.parametrize('name, make, fold', [
    ('onnx', lambda: models.vit_classifier(dict(type='LN')), False),
    pytest.param('openvino', models.t2t_classifier, True, marks=pytest.mark.slow),
    pytest.param('onnx', models.deit_classifier, True, marks=pytest.mark.slow),
])
def test_other_classifiers(tmp_path, name, make, fold):
    model = classifier(make, fold)
    traced = trace(model, meta_of(model, (32, 32)), 2)
    report = save(traced, FORMATS[name], tmp_path / f'm{FORMATS[name].suffix}')
    assert report.difference.largest['scores'] < 2e-6
    # LayerNorm is a node of its own; a norm that is folded is nothing.
    nodes = [node.op_type for node in traced.program.model.graph]
    assert nodes.count('LayerNormalization') == report.norms == (0 if fold else 5)
    assert_runs(model, report.path, 3, (32, 32))


@pytest.mark.slow
def test_an_enhancer_is_in_the_file(tmp_path):
    model = classifier(lambda: models.classifier(models.swin_backbone(
        arch=dict(embed_dims=8, depths=[2], num_heads=[2]), out_indices=(0, )), 8), fold=False)
    model.data_preprocessor = EnhancingPreprocessor(model.data_preprocessor, IAT(), frozen=False, takes_rgb=False)
    fuse_norms(model.eval(), strict=True)
    report = save(trace(model, meta_of(model, (32, 32))), FORMATS['onnx'], tmp_path / 'm.onnx')
    assert report.norms == 0 and report.difference.largest['scores'] < 2e-5
    assert_runs(model, report.path, 3, (32, 32), atol=2e-5)


def test_the_runner_takes_the_cpu(tmp_path, plain, monkeypatch):
    """Not each provider that there is: TensorRT would build an engine for minutes, and CUDA needs a GPU."""
    path = save(plain[1], FORMATS['onnx'], tmp_path / 'm.onnx').path
    asked, session = [], onnxruntime.InferenceSession

    def note(*args, providers):
        asked.extend(providers)
        return session(*args, providers=['CPUExecutionProvider'])

    monkeypatch.setattr(onnxruntime, 'InferenceSession', note)
    monkeypatch.setattr(onnxruntime, 'get_available_providers', lambda: [
        f'{name}ExecutionProvider' for name in ('Tensorrt', 'CUDA', 'CPU')])
    Runner(path)
    assert asked == ['CPUExecutionProvider']


@pytest.mark.parametrize('name', ['onnx', 'openvino'])
def test_weights_in_float16(tmp_path, plain, name):
    """As float16 in the file, and computed with in float32."""
    full = save(plain[1], FORMATS[name], tmp_path / f'full{FORMATS[name].suffix}')
    half = save(plain[1], FORMATS[name], tmp_path / f'half{FORMATS[name].suffix}', half=True)
    assert half.size < full.size
    assert full.difference.largest['scores'] < half.difference.largest['scores'] < 5e-3


def test_what_float16_cannot_hold_stays(tmp_path):
    big, small, vector = (numpy_helper.from_array(np.full(shape, value, np.float32), name)
                          for name, shape, value in (('a', (2, 2), 7e4), ('b', (2, 2), 0.1), ('c', (2, ), 1.)))
    graph = helper.make_graph([helper.make_node('Sum', ['a', 'b', 'c'], ['y'])], 'g', [],
                              [helper.make_tensor_value_info('y', TensorProto.FLOAT, [2, 2])], [big, small, vector])
    store_as_half(graph)
    kinds = {each.name: each.data_type for each in graph.initializer}
    assert kinds == {'a': TensorProto.FLOAT, 'b_half': TensorProto.FLOAT16, 'c': TensorProto.FLOAT}
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 18)], ir_version=8)
    out, = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {})
    assert out[0, 0] == np.float32(7e4) + np.float32(np.float16(0.1)) + 1


@pytest.mark.slow
@pytest.mark.parametrize('name', ['onnx', 'openvino'])
def test_a_swin_for_any_number_and_size(tmp_path, open_swin, name):
    model, traced = open_swin
    assert traced.meta['shape'] == [None, 3, None, None] and traced.meta['divisor'] == 4
    path = save(traced, FORMATS[name], tmp_path / f'm{FORMATS[name].suffix}').path
    # The first map is one window, the second is padded, and the third is neither.
    for number, size in ((1, (16, 16)), (3, (20, 36)), (2, (32, 48))):
        assert_runs(model, path, number, size)
    runner = Runner(path)
    with pytest.raises(PreflightError, match='multiples of 4, got 32 x 30'):
        runner(np.zeros((1, 3, 32, 30), np.float32))
    assert runner.classify(np.full((45, 61, 3), 99, np.uint8)).shape == (5, )


def test_a_vit_for_any_number(tmp_path):
    """With its norms, and of a fixed size."""
    model = classifier(models.vit_classifier, fold=False)
    traced = trace(model, meta_of(model, (32, 32)), dynamic=True)
    assert traced.meta['shape'] == [None, 3, 32, 32]
    report = save(traced, FORMATS['onnx'], tmp_path / 'm.onnx')
    assert report.norms == 5
    for number in (1, 3):
        assert_runs(model, report.path, number, (32, 32))


def test_what_cannot_be_exported():
    with pytest.raises(PreflightError, match='RetinaNet cannot be exported'):
        graph_of(models.detector())
    model = classifier(swin)
    with pytest.raises(PreflightError, match='pad_small_map.*--shape'):
        trace(model, meta_of(model, (20, 20)))
    other = copy.deepcopy(model)
    other.head.__class__ = type('OwnHead', (type(other.head), ), dict(_get_predictions=None))
    with pytest.raises(PreflightError, match='OwnHead'):
        graph_of(other)
