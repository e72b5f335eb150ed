"""ExecuTorch's files."""
import pytest
import torch

from mmunorm import fuse_norms
from mmunorm.deploy import FORMATS, Runner, export_file, prepare_export
from mmunorm.deploy.graphs import graph_of
from mmunorm.deploy.pictures import Samples
from mmunorm.utils import PreflightError

from ..fusion import models
from .conftest import blurred, meta_of, normalizing

pytest.importorskip('executorch')
pytest.importorskip('onnx')  # the newer torch alone has it

EXECUTORCH = FORMATS['executorch']


def test_a_layer_norm_is_outside_of_the_parts(swin, exportable, tmp_path):
    made = export_file(exportable, EXECUTORCH, tmp_path / 'm.pte')
    assert made.difference.largest['scores'] < 2e-6 and 'native_layer_norm' not in made.lines[0]
    images = blurred(3, seed=1).float()  # a batch that the file's size does not divide
    assert abs(Runner(made.path)(images.numpy())['scores'] - graph_of(swin)(images).detach().numpy()).max() < 2e-6
    stock = normalizing(models.swin_classifier(dict(type='LN')))
    made = export_file(prepare_export(stock, meta_of(stock)), EXECUTORCH, tmp_path / 'm.pte')
    assert 'native_layer_norm' in made.lines[0] and made.norms == 11


def test_int8(swin, exportable, tmp_path):
    model = normalizing(models.deit_classifier())
    fuse_norms(model)
    pictures = list(torch.nn.functional.interpolate(blurred().float(), (32, 32)).byte())
    vit = prepare_export(model, meta_of(model, (32, 32)))
    made = export_file(vit, EXECUTORCH, tmp_path / 'm.pte', int8='static', samples=Samples(pictures, vit.meta, 1))
    assert 1e-4 < made.difference.largest['scores'] < 0.05
    with pytest.raises(PreflightError, match='cannot be loaded'):  # when this fails, XNNPACK has learned it: say so
        export_file(exportable, EXECUTORCH, tmp_path / 's.pte', int8='static',
                    samples=Samples(list(blurred()), exportable.meta, 2))
    assert [path.name for path in tmp_path.iterdir()] == ['m.pte']


def test_what_is_refused(swin, exportable, tmp_path):
    model = normalizing(models.deit_classifier())
    fuse_norms(model)
    for each, how in ((exportable, dict(half=True)),
                      (prepare_export(model, meta_of(model, (32, 32)), dynamic=True), {})):
        with pytest.raises(PreflightError, match='does not go with --format executorch'):
            export_file(each, EXECUTORCH, tmp_path / 'm.pte', **how)
