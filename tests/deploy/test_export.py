"""Whole models in ONNX Runtime and OpenVINO beside torch."""
import copy

import pytest
import torch

from mmunorm import fuse_norms
from mmunorm.errors import PreflightError

from ..fusion import models

for package in ('onnx', 'onnxscript', 'onnxruntime', 'openvino'):
    pytest.importorskip(package)

from mmunorm.deploy import FORMATS, Runner, save, trace
from mmunorm.deploy.graphs import graph_of

from .detectors import rcnn


def meta_of(model, shape):
    detector = hasattr(model, 'roi_head')
    return dict(task='detector' if detector else 'classifier', model=type(model).__name__, classes=['a', 'b', 'c'],
                steps=[], divisor=4, bgr=True, shape=[1, 3, *shape], mask_threshold=0.5)


def made(model, path, shape, name, batch=1):
    traced = trace(model, meta_of(model, shape), batch)
    return save(traced, FORMATS[name], path.with_suffix(FORMATS[name].suffix))


def classifier(make, fold=True):
    model = make()
    model.data_preprocessor.register_buffer('mean', torch.full((3, 1, 1), 120.), False)
    model.data_preprocessor.register_buffer('std', torch.full((3, 1, 1), 60.), False)
    model.data_preprocessor._enable_normalize = True
    models.randomize(model, gamma='none')
    if fold:
        fuse_norms(model, strict=True)
    return model


@pytest.mark.parametrize('name, make, fold, shape', [
    ('openvino', models.swin_classifier, True, (37, 45)),  # windows are padded
    ('onnx', lambda: models.swin_classifier(dict(type='LN')), False, (32, 32)),
    pytest.param('onnx', models.swin_classifier, False, (37, 45), marks=pytest.mark.slow),
    pytest.param('openvino', models.swin_classifier, False, (37, 45), marks=pytest.mark.slow),
    pytest.param('openvino', models.stock_swin_classifier, True, (37, 45), marks=pytest.mark.slow),
    pytest.param('openvino', models.t2t_classifier, True, (32, 32), marks=pytest.mark.slow),
    pytest.param('onnx', models.t2t_classifier, False, (32, 32), marks=pytest.mark.slow),
    pytest.param('openvino', models.vit_classifier, True, (32, 32), marks=pytest.mark.slow),
    pytest.param('onnx', models.deit_classifier, True, (32, 32), marks=pytest.mark.slow),
])
def test_classifiers(tmp_path, name, make, fold, shape):
    model = classifier(make, fold)
    report = made(model, tmp_path / 'm', shape, name, batch=2)
    assert report.difference['scores'] < 2e-6
    assert (report.norms == 0) == fold
    assert report.size == sum(file.stat().st_size for file in tmp_path.iterdir()) > 10_000
    # Other pictures, and a batch that the file's size does not divide.
    runner = Runner(report.path)
    images = torch.rand(3, 3, *shape) * 20 + 100
    with torch.no_grad():
        expected = graph_of(model)(images)
    assert expected.std() > 0.01
    torch.testing.assert_close(torch.from_numpy(runner(images.numpy())['scores']), expected, rtol=0, atol=2e-6)


def test_norms_in_the_graph():
    """LayerNorm is a node of its own; a norm that is folded is nothing."""
    model = classifier(lambda: models.vit_classifier(dict(type='LN')), fold=False)
    traced = trace(model, meta_of(model, (32, 32)))
    nodes = [node.op_type for node in traced.program.model.graph]
    assert nodes.count('LayerNormalization') == traced.norms == 5


@pytest.fixture(scope='module')
def detector(tmp_path_factory):
    """A folded Mask R-CNN and its files for two pictures at once."""
    model = rcnn()
    fuse_norms(model, strict=True)
    traced = trace(model, meta_of(model, (72, 100)), 2)
    folder = tmp_path_factory.mktemp('detector')
    return traced, {name: save(traced, FORMATS[name], folder / f'm{FORMATS[name].suffix}')
                    for name in ('onnx', 'openvino')}


@pytest.mark.slow
@pytest.mark.parametrize('name', ['onnx', 'openvino'])
def test_detector(detector, name):
    traced, reports = detector
    report = reports[name]
    assert report.norms == 0
    assert not any('Normalization' in node.op_type for node in traced.program.model.graph)
    assert report.difference['boxes'] < 1e-2 and report.difference['scores'] < 1e-5
    assert report.difference['masks'] < 1e-3
    runner = Runner(report.path)
    assert runner.classes == ['a', 'b', 'c'] and runner.is_detector
    images, sizes = torch.rand(3, 3, 72, 100) * 255, torch.tensor([[72., 100.], [50., 31.], [0., 0.]])
    out = runner(images.numpy(), sizes.numpy())
    assert out['dets'].shape == (3, 20, 5) and out['labels'].shape == (3, 20)
    assert out['masks'].shape == (3, 20, 8, 8)
    assert (out['dets'][:2, :, 4] > 0).any(1).all()
    assert out['dets'][1, :, 2].max() <= 31 and out['dets'][1, :, 3].max() <= 50
    # Without pixels there is no proposal, and no detection.
    assert all((array[2] == 0).all() for array in out.values())
    found = runner.detect(images[0].permute(1, 2, 0).numpy().astype('uint8')[:40])
    assert len(found.boxes) > 0 and found.masks.shape[1:] == (40, 100)


def test_what_cannot_be_exported(tmp_path):
    with pytest.raises(PreflightError, match='RetinaNet cannot be exported'):
        graph_of(models.detector())
    model = classifier(models.swin_classifier)
    with pytest.raises(PreflightError, match='pad_small_map.*--shape'):
        made(model, tmp_path / 'm', (20, 20), 'onnx')
    other = copy.deepcopy(model)
    other.head.__class__ = type('OwnHead', (type(other.head), ), dict(_get_predictions=None))
    with pytest.raises(PreflightError, match='OwnHead'):
        graph_of(other)
