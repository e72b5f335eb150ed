"""Whole detectors in each runtime, and the tools that use their files, all from one export a runtime."""
import cv2
import mmcv
import numpy as np
import pytest
import torch
from mmengine.config import Config

from mmunorm import fuse_norms
from mmunorm.cli.images import drawing_scale
from mmunorm.deploy import FORMATS, ExportedModel, describe_model, export_file, prepare_export
from mmunorm.deploy.preprocessing import Samples

from .. import tiny_runs
from .conftest import needs, write
from .detectors import KINDS, MOST, assert_same_detections, batch, rcnn

needs('onnx', 'openvino')

TEST, INFER = (tiny_runs.load_tool(f'deploy/{name}') for name in ('test', 'infer'))
pytestmark = pytest.mark.slow
SIZES = [(72, 100), (61, 83)]


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    """A config with tiny COCO data, and the options to use them."""
    return tiny_runs.write_detector(tmp_path_factory.mktemp('coco'))


@pytest.fixture(scope='module')
def detector(config):
    """A folded Cascade Mask R-CNN for two images at once, whose maps windows pad, and what torch detects with norms."""
    model = rcnn(rcnn_cfg=MOST, cascade=dict(reg_class_agnostic=True))
    model.data_preprocessor.pad_value = 1.
    expected = model.test_step(batch(SIZES))
    fuse_norms(model, strict=True)
    meta = describe_model(model, Config.fromfile(config[0]), dict(dataset_meta=dict(classes=('a', 'b', 'c'))), SIZES[0])
    return prepare_export(model, meta, 2), expected


@pytest.fixture(scope='module', params=['onnx', 'openvino', 'litert'])
def report(request, detector, tmp_path_factory):
    needs(request.param)
    return write(detector[0], request.param, tmp_path_factory.mktemp(request.param))


def test_detections_are_those_of_torch(report, detector):
    found = report.difference
    assert report.norms == 0 and found.matches == found.expected == found.found > 0
    assert found.largest['boxes'] < 1e-2 and found.largest['scores'] < 1e-5 and found.largest['masks'] < 1e-3
    assert_same_detections(ExportedModel(report.path).test_step(batch(SIZES)), detector[1])


@pytest.mark.grid
@pytest.mark.parametrize('kind', ['retinanet', 'retinanet_pvt', 'mask_rcnn', 'cascade_rcnn'])
@pytest.mark.parametrize('name', ['onnx', 'openvino', 'litert'])
def test_other_detectors(kind, name, config, tmp_path):
    needs(name)
    model = KINDS[kind]()
    expected = model.test_step(batch(SIZES))
    fuse_norms(model, strict=True)
    exportable = prepare_export(model, describe_model(model, Config.fromfile(config[0]), {}, SIZES[0]), 2)
    assert_same_detections(ExportedModel(write(exportable, name, tmp_path).path).test_step(batch(SIZES)), expected)


def test_images_of_any_size_in_one_batch(report):
    runner = ExportedModel(report.path)
    assert runner.classes == ['a', 'b', 'c'] and runner.is_detector
    images, sizes = torch.rand(3, 3, 72, 100) * 255, torch.tensor([[72., 100.], [50., 31.], [0., 0.]])
    out = runner(images.numpy(), sizes.numpy())
    assert out['dets'].shape == (3, 60, 5) and out['labels'].shape == (3, 60)
    assert out['masks'].shape == (3, 60, 8, 8)
    assert (out['dets'][:2, :, 4] > 0).any(1).all()
    assert out['dets'][1, :, 2].max() <= 31 and out['dets'][1, :, 3].max() <= 50
    # Without pixels there is no proposal, and no detection.
    assert all((array[2] == 0).all() for array in out.values())
    found = runner.detect(images[0].permute(1, 2, 0).numpy().astype('uint8')[:40])
    assert len(found.boxes) > 0 and found.masks.shape[1:] == (40, 100)


@pytest.mark.parametrize('kind', [None, *(pytest.param(kind, marks=pytest.mark.grid) for kind in (
    'retinanet', 'mask_rcnn'))])  # None: the Cascade Mask R-CNN, converted once for this and the file in floating point
def test_integers_only(kind, config, detector, tmp_path):
    needs('litert')
    exportable = detector[0]
    if kind is not None:
        model = KINDS[kind]()
        fuse_norms(model, strict=True)
        exportable = prepare_export(model, describe_model(model, Config.fromfile(config[0]), {}, SIZES[0]), 2)
    images, _ = exportable.inputs
    samples = Samples([*images.byte(), *images.flip(3).byte()], exportable.meta, 2)
    written = export_file(exportable, FORMATS['litert'], tmp_path / 'm.tflite', int8='full', samples=samples)
    session = FORMATS['litert'].open(written.path)
    parts = ['features', *(['heads', 'masks'] if kind != 'retinanet' else []),
             *(['refine0', 'refine1'] if kind is None else [])]
    assert {session.input_of(part)[1]['dtype'] for part in parts} == {np.int8}
    assert written.difference.matches > 0.5 * written.difference.expected
    assert written.difference.median.get('masks', 0) < 0.05


@pytest.mark.parametrize('report', ['onnx'], indirect=True)
def test_the_tools(config, report, tmp_path, capsys):
    path, options = config
    metrics = tiny_runs.call(TEST, path, report.path, '--cfg-options', *options)
    assert 'coco/bbox_mAP' in metrics and 'coco/segm_mAP' in metrics
    image = np.random.default_rng(0).integers(0, 256, (300, 90, 3), np.uint8)  # shrunk to fit
    cv2.imwrite(str(tmp_path / 'b.png'), image)
    tiny_runs.call(INFER, report.path, tmp_path / 'b.png', '--out-dir', tmp_path / 'drawn', '--score-thr', '0')
    plain = mmcv.imrescale(image, drawing_scale(*image.shape[:2]))
    assert not np.array_equal(cv2.imread(str(tmp_path / 'drawn/b.png')), plain)
    with pytest.raises(SystemExit):
        tiny_runs.call(TEST, path, report.path, '--cfg-options', *options,
                       'test_dataloader.dataset.pipeline.1.scale=(300,200)')
    assert 'does not fit into' in capsys.readouterr().err.splitlines()[-1]
