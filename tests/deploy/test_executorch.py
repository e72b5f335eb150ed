"""ExecuTorch's files."""
import pytest

from mmunorm import fuse_norms
from mmunorm.deploy import FORMATS, Runner, export_file, prepare_export
from mmunorm.deploy.graphs import graph_of
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


def test_what_is_refused(swin, exportable, tmp_path):
    model = normalizing(models.deit_classifier())
    fuse_norms(model)
    for each, how in ((exportable, dict(half=True)),
                      (prepare_export(model, meta_of(model, (32, 32)), dynamic=True), {})):
        with pytest.raises(PreflightError, match='does not go with --format executorch'):
            export_file(each, EXECUTORCH, tmp_path / 'm.pte', **how)
    with pytest.raises(PreflightError, match='^--format executorch has no --int8'):
        EXECUTORCH.int8_kind('')
