"""What a data preprocessor does to images is in the file, or the model is refused."""
import copy

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmpretrain.models import ClsDataPreprocessor
from mmpretrain.structures import DataSample

from mmunorm import fuse_norms
from mmunorm.deploy import FORMATS, ExportedModel, describe_model, export_file, prepare_export
from mmunorm.deploy.formats.pytorch import TorchSession
from mmunorm.deploy.preprocessing import Samples
from mmunorm.deploy.tasks.features import WithRest
from mmunorm.utils import PreflightError

from .conftest import SHAPE, blurred, meta_of, needs, normalizing, small_swin, write
from .detectors import assert_same_detections, batch, retinanet

PIPELINE = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(94, 94), keep_ratio=True),
            dict(type='PackDetInputs')]
CFG = Config(dict(test_dataloader=dict(dataset=dict(pipeline=PIPELINE))))
SIZES = (94, 70), (50, 94)


def detector(pad_value):
    model = retinanet(max_per_img=60)
    model.data_preprocessor.pad_value = pad_value
    fuse_norms(model, strict=True)
    return model


def classifier(divisor):
    """Its images of 37 x 45 pixels become 40 x 48 with a border of 3."""
    model = normalizing(small_swin())
    model.data_preprocessor.pad_size_divisor, model.data_preprocessor.pad_value = divisor, 3
    fuse_norms(model, strict=True)
    return model


@torch.no_grad()
def scores_of(model, images):
    found = model.test_step(dict(inputs=images, data_samples=[DataSample() for _ in images]))
    return torch.stack([sample.pred_score for sample in found]).numpy()


def stock(exportable):
    return ExportedModel(TorchSession(exportable.graph, exportable.meta))


def test_a_detector_with_a_border_that_is_not_0():
    model = detector(3.)
    meta = describe_model(model, CFG, {})
    assert meta['shape'][2:] == [96, 96]  # 94 is no multiple of 4
    exportable = prepare_export(model, meta, 2)
    assert_same_detections(stock(exportable).test_step(batch(SIZES)), model.test_step(batch(SIZES)))
    pad = torch.tensor(exportable.graph.settings['pad']).view(1, 3, 1, 1).expand(-1, -1, 4, 4)
    torch.testing.assert_close(exportable.graph.pixels(pad), torch.full((1, 3, 4, 4), 3.), rtol=0, atol=1e-4)


def test_a_border_that_bytes_cannot_hold(tmp_path):
    needs('litert')
    model = detector(10.)
    exportable = prepare_export(model, describe_model(model, CFG, {}))
    images = Samples([torch.zeros(3, 94, 94, dtype=torch.uint8)], exportable.meta, 1)
    with pytest.raises(PreflightError, match='input is the bytes .* the pad_value of the data_preprocessor is'):
        export_file(exportable, FORMATS['litert'], tmp_path / 'm.tflite', int8='full', samples=images)


def test_a_classifier_that_pads_its_images():
    model, images = classifier(8), blurred(4)
    expected = scores_of(model, images)
    found = stock(prepare_export(model, meta_of(model, SHAPE), 2))(images.float().numpy())['scores']
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    model.data_preprocessor.pad_size_divisor = 1  # the border changes the scores
    assert np.abs(scores_of(model, images) - expected).max() > 1e-3


class Grey(ClsDataPreprocessor):

    def forward(self, data, training=False):
        return super().forward({**data, 'inputs': data['inputs'].float().mean(1, keepdim=True).expand(-1, 3, -1, -1)})


def test_what_a_file_would_not_do_is_refused():
    model = classifier(1)
    prepare_export(model, meta_of(model))
    other = copy.deepcopy(model)
    other.data_preprocessor = Grey([120.] * 3, [60.] * 3)
    with pytest.raises(PreflightError, match='^Grey, the data_preprocessor of ImageClassifier, does something that the '
                                             r'file would not: SNR of images -?\d+\.\d dB'):
        prepare_export(other, meta_of(other))
    found = detector(0.)
    meta = describe_model(found, CFG, {})
    found.data_preprocessor.forward = lambda data, training=False: dict(
        inputs=torch.zeros(len(data['inputs']), 3, 96, 96), data_samples=data['data_samples'])
    with pytest.raises(PreflightError, match='DetDataPreprocessor, the data_preprocessor of RetinaNet'):
        prepare_export(found, meta)


# ---------------------------------------------------------------- backbone and neck alone

def backbone_of(model):
    return prepare_export(model, describe_model(model, CFG, {}, parts='backbone'))


@pytest.mark.parametrize('name', ['torch', pytest.param('onnx', marks=pytest.mark.slow)])
def test_detections_of_a_backbone_with_the_rest_in_torch(name, tmp_path):
    model = retinanet(max_per_img=60)
    expected = model.test_step(batch(SIZES))
    fuse_norms(model, strict=True)
    exportable = backbone_of(model)
    assert exportable.meta['outputs'] == ('map0', 'map1', 'map2')
    runner = stock(exportable)
    if name != 'torch':
        needs(name)
        report = write(exportable, name, tmp_path)
        assert max(report.difference.largest.values()) < 1e-4
        runner = ExportedModel(report.path)
    assert_same_detections(WithRest(runner, model).test_step(batch(SIZES)), expected)
    assert 'extract_feat' not in vars(model)


def test_a_format_that_has_no_parts():
    chosen = type('X', (type(FORMATS['onnx']), ), dict(name='x', tasks=('classifier', 'detector')))()
    with pytest.raises(PreflightError, match='--format x supports classifier and detector, but .* would be features'):
        chosen.check_model(backbone_of(retinanet()))
