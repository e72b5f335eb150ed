"""Classifiers in each format beside torch, and which format is chosen."""
import copy

import numpy as np
import pytest
import torch

from mmunorm import fuse_norms
from mmunorm.deploy.formats import FORMATS, find_format, table
from mmunorm.utils import PreflightError

from ..fusion import models
from .conftest import SHAPE, meta_of, normalizing


@pytest.mark.parametrize('name, expected', [('onx', 'did you mean onnx?'), ('OpenVINO', 'did you mean openvino?'),
                                            ('zzz', f"one of {', '.join(FORMATS)}, got 'zzz'")])
def test_a_mistyped_format_gets_the_nearest(name, expected):
    with pytest.raises(PreflightError) as error:
        find_format(name)
    assert expected in str(error.value)


def test_what_is_missing_is_named(monkeypatch):
    installed = []
    monkeypatch.setattr('mmunorm.deploy.formats.base.find_spec', lambda name: name in installed or None)
    monkeypatch.setattr(torch, '__version__', '2.8.1+cpu')
    with pytest.raises(PreflightError, match=r"^missing: onnx, onnxscript, openvino; get .* -e '\.\[deploy\]'$"):
        find_format('openvino')
    installed += ['onnx', 'onnxscript', 'openvino', 'onnxruntime']
    with pytest.raises(PreflightError, match='^missing: nncf;'):
        find_format('openvino', int8=True)
    with pytest.raises(PreflightError, match=r'^the exporter needs torch 2.9 or newer, and this Python has 2.8.1\+cpu'):
        find_format('onnx', int8=True)
    monkeypatch.setattr(torch, '__version__', '2.10.0')
    assert find_format('onnx', int8=True) is FORMATS['onnx']


def test_the_table():
    lines = table().splitlines()
    assert len(lines) == 1 + len(FORMATS) and lines[2].split() == ['openvino', '.xml', 'OpenVINO', 'static']


for package in ('onnx', 'onnxscript', 'onnxruntime', 'openvino'):
    pytest.importorskip(package)

import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from mmunorm.deploy import Runner, export_file, prepare_export
from mmunorm.deploy.formats.onnx import store_as_half
from mmunorm.deploy.graphs import graph_of
from mmunorm.enhancement import IAT, EnhancingPreprocessor


def one_stage():
    return models.classifier(models.swin_backbone(
        arch=dict(embed_dims=8, depths=[2], num_heads=[2]), out_indices=(0, )), 8)


def export(exportable, name, folder, stem='m', **how):
    return export_file(exportable, FORMATS[name], folder / f'{stem}{FORMATS[name].suffixes[0]}', **how)


def assert_runs(model, path, number, size, atol=2e-6):
    """The runtime computes what torch does, for other pictures than the exporter compares."""
    images = torch.rand(number, 3, *size) * 20 + 100
    with torch.no_grad():
        expected = graph_of(model)(images)
    assert expected.std() > 0.01
    got = torch.from_numpy(Runner(path)(images.numpy())['scores'])
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize('name', ['onnx', 'openvino'])
def test_a_swin_and_its_weights_in_float16(swin, exportable, tmp_path, name):
    full = export(exportable, name, tmp_path)
    assert full.norms == 0 and full.difference.largest['scores'] < 2e-6
    assert full.size == sum(file.stat().st_size for file in tmp_path.iterdir()) > 10_000
    assert_runs(swin, full.path, 3, SHAPE)  # a batch that the file's size does not divide
    half = export(exportable, name, tmp_path, 'half', half=True)
    assert half.size < full.size  # computed with in float32
    assert full.difference.largest['scores'] < half.difference.largest['scores'] < 5e-3


def test_a_failed_export_leaves_the_old_file(exportable, tmp_path):
    class Broken(type(FORMATS['onnx'])):

        def load(self, path, threads):
            raise RuntimeError('no kernel')

    (tmp_path / 'm.onnx').write_text('old')
    with pytest.raises(PreflightError, match='cannot be loaded: RuntimeError: no kernel'):
        export_file(exportable, Broken(), tmp_path / 'm.onnx')
    assert [path.name for path in tmp_path.iterdir()] == ['m.onnx'] and (tmp_path / 'm.onnx').read_text() == 'old'


def test_what_float16_cannot_hold_stays():
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
@pytest.mark.parametrize('name, make', [('openvino', models.t2t_classifier), ('onnx', models.deit_classifier)])
def test_other_classifiers(tmp_path, name, make):
    model = normalizing(make())
    fuse_norms(model, strict=True)
    made = export(prepare_export(model, meta_of(model, (32, 32)), 2), name, tmp_path)
    assert made.norms == 0 and made.difference.largest['scores'] < 2e-6


def test_a_vit_with_its_norms_for_any_number(tmp_path):
    """Its size is fixed. LayerNorm is a node of its own."""
    model = normalizing(models.vit_classifier(dict(type='LN')))
    exportable = prepare_export(model, meta_of(model, (32, 32)), dynamic=True)
    assert exportable.meta['shape'] == [None, 3, 32, 32]
    made = export(exportable, 'onnx', tmp_path)
    nodes = [node.op_type for node in onnx.load(made.path).graph.node]
    assert nodes.count('LayerNormalization') == made.norms == 5
    for number in (1, 3):
        assert_runs(model, made.path, number, (32, 32))


@pytest.mark.slow
def test_an_enhancer_is_in_the_file(tmp_path):
    model = normalizing(one_stage())
    model.data_preprocessor = EnhancingPreprocessor(model.data_preprocessor, IAT(), frozen=False, takes_rgb=False)
    fuse_norms(model.eval(), strict=True)
    made = export(prepare_export(model, meta_of(model, (32, 32))), 'onnx', tmp_path)
    assert made.norms == 0 and made.difference.largest['scores'] < 2e-5
    assert_runs(model, made.path, 3, (32, 32), atol=2e-5)


@pytest.mark.slow
def test_a_swin_for_any_number_and_size(tmp_path):
    model = normalizing(one_stage())
    fuse_norms(model, strict=True)
    exportable = prepare_export(model, meta_of(model, (32, 32)), dynamic=True)
    assert exportable.meta['shape'] == [None, 3, None, None] and exportable.meta['divisor'] == 4
    for name in ('onnx', 'openvino'):
        path = export(exportable, name, tmp_path).path
        # The first map is one window, the second is padded, and the third is neither.
        for number, size in ((1, (16, 16)), (3, (20, 36)), (2, (32, 48))):
            assert_runs(model, path, number, size)
    runner = Runner(path)
    with pytest.raises(PreflightError, match='multiples of 4, got 32 x 30'):
        runner(np.zeros((1, 3, 32, 30), np.float32))
    assert runner.classify(np.full((45, 61, 3), 99, np.uint8)).shape == (5, )


def test_what_cannot_be_exported(swin):
    with pytest.raises(PreflightError, match='RetinaNet cannot be exported'):
        graph_of(models.detector())
    with pytest.raises(PreflightError, match='pad_small_map.*--shape'):
        prepare_export(swin, meta_of(swin, (20, 20)))
    other = copy.deepcopy(swin)
    other.head.__class__ = type('OwnHead', (type(other.head), ), dict(_get_predictions=None))
    with pytest.raises(PreflightError, match='OwnHead'):
        graph_of(other)
