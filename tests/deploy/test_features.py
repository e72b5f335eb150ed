"""Backbone and neck of any detector as one file, and the rest of it in torch."""
import numpy as np
import pytest
import torch
from mmdet.models import DetDataPreprocessor
from mmdet.structures import DetDataSample
from mmengine.config import Config, ConfigDict

from mmunorm import fuse_norms
from mmunorm.deploy import FORMATS, ExportedModel, describe_model, export_file, find_format, prepare_export
from mmunorm.deploy.features import WithRest
from mmunorm.deploy.formats.pytorch import TorchSession
from mmunorm.utils import PreflightError

from ..fusion import models

PIPELINE = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(96, 96), keep_ratio=True),
            dict(type='PackDetInputs')]
CFG = Config(dict(test_dataloader=dict(dataset=dict(pipeline=PIPELINE))))


@pytest.fixture
def retinanet():
    """A RetinaNet, which no exporter knows whole."""
    model = models.randomize(models.detector(num_outs=5), gamma='none')
    model.data_preprocessor = DetDataPreprocessor(mean=[123., 116., 103.], std=[58., 57., 57.], bgr_to_rgb=True,
                                                  pad_size_divisor=32)
    model.bbox_head.test_cfg = ConfigDict(nms_pre=50, min_bbox_size=0, score_thr=0., max_per_img=20,
                                          nms=dict(type='nms', iou_threshold=0.5))
    for layer, gain in ((model.bbox_head.retina_cls, 0.1), (model.bbox_head.retina_reg, 0.02)):
        layer.weight.data *= gain  # not all boxes as large as the image, nor all scores 1
    return model.eval()


def batch():
    generator = torch.Generator().manual_seed(1)
    sizes = ((96, 70), (50, 96))
    samples = [DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1., 1.))) for size in sizes]
    return dict(inputs=[torch.randint(0, 256, (3, *size), generator=generator, dtype=torch.uint8) for size in sizes],
                data_samples=samples)


def exportable_of(model):
    return prepare_export(model, describe_model(model, CFG, {}, parts='backbone'))


@pytest.mark.parametrize('name', ['torch', pytest.param('onnx', marks=pytest.mark.slow)])
def test_detections_are_those_of_torch(name, retinanet, tmp_path):
    expected = retinanet.test_step(batch())
    fuse_norms(retinanet, strict=True)
    exportable = exportable_of(retinanet)
    assert exportable.meta['outputs'] == ('map0', 'map1', 'map2', 'map3', 'map4')
    if name == 'onnx':
        pytest.importorskip('onnxscript')
        made = export_file(exportable, find_format('onnx'), tmp_path / 'm.onnx')
        assert max(made.difference.largest.values()) < 1e-4
        runner = ExportedModel(made.path)
    else:
        runner = ExportedModel(TorchSession(exportable.stock, exportable.meta))
    for own, other in zip(WithRest(runner, retinanet).test_step(batch()), expected, strict=True):
        a, b = own.pred_instances, other.pred_instances
        assert len(a) == len(b) > 5
        np.testing.assert_allclose(a.scores, b.scores, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(a.bboxes, b.bboxes, rtol=1e-3, atol=1e-2)
        assert a.labels.tolist() == b.labels.tolist()
    assert 'extract_feat' not in vars(retinanet)


def test_what_is_refused(retinanet):
    with pytest.raises(PreflightError, match='RetinaNet cannot be exported whole: .*backbone in onnx or openvino'):
        prepare_export(retinanet, describe_model(retinanet, CFG, {}))
    with pytest.raises(PreflightError, match='--format x has no --parts backbone: onnx and openvino have'):
        chosen = type('X', (type(FORMATS['onnx']), ), dict(name='x', tasks=('classifier', 'detector')))()
        chosen.check_model(exportable_of(retinanet))
