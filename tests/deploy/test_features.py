"""Backbone and neck of any detector as one file, and the rest of it in torch."""
import pytest
from mmengine.config import Config

from mmunorm import fuse_norms
from mmunorm.deploy import FORMATS, ExportedModel, describe_model, export_file, prepare_export
from mmunorm.deploy.features import WithRest
from mmunorm.deploy.formats.pytorch import TorchSession
from mmunorm.utils import PreflightError

from .detectors import assert_same_detections, batch, retinanet

PIPELINE = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(96, 96), keep_ratio=True),
            dict(type='PackDetInputs')]
CFG = Config(dict(test_dataloader=dict(dataset=dict(pipeline=PIPELINE))))


SIZES = (96, 70), (50, 96)


def exportable_of(model):
    return prepare_export(model, describe_model(model, CFG, {}, parts='backbone'))


@pytest.mark.parametrize('name', ['torch', *(
    pytest.param(name, marks=pytest.mark.slow) for name in ('onnx', 'openvino'))])
def test_detections_are_those_of_torch(name, tmp_path):
    model = retinanet(max_per_img=60)
    expected = model.test_step(batch(SIZES))
    fuse_norms(model, strict=True)
    exportable = exportable_of(model)
    assert exportable.meta['outputs'] == ('map0', 'map1', 'map2')
    if name != 'torch':
        for package in FORMATS[name].packages:
            pytest.importorskip(package)
        made = export_file(exportable, FORMATS[name], tmp_path / f'm{FORMATS[name].suffixes[0]}')
        assert max(made.difference.largest.values()) < 1e-4
        runner = ExportedModel(made.path)
    else:
        runner = ExportedModel(TorchSession(exportable.stock, exportable.meta))
    assert_same_detections(WithRest(runner, model).test_step(batch(SIZES)), expected)
    assert 'extract_feat' not in vars(model)


def test_a_format_that_has_no_parts():
    chosen = type('X', (type(FORMATS['onnx']), ), dict(name='x', tasks=('classifier', 'detector')))()
    with pytest.raises(PreflightError, match='--format x has no --parts backbone: onnx and openvino have'):
        chosen.check_model(exportable_of(retinanet()))
