"""The form in which `export` folds the copy of a model."""
import copy
from collections import Counter

import pytest
import timm
import torch
from torch import nn

import mmunorm
from mmunorm import fuse_norms
from mmunorm.deploy.forms import UNROTATED, fold_for, folded_copy
from mmunorm.fusion import FoldedLayerNorm, streams_of

from ..fusion.models import randomize
from .conftest import needs, operators_in

needs('onnx')

IMAGES = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SMALL = dict(img_size=32, num_classes=5, embed_dim=32, depth=1)
MODELS = {
    'a ViT': ('vit_tiny_patch16_224', dict(SMALL, num_heads=2, patch_size=8)),
    'a DeiT with a distilled token': ('deit_tiny_distilled_patch16_224', dict(SMALL, num_heads=2, patch_size=8)),
    'a ViT with registers': ('vit_tiny_patch16_224', dict(SMALL, num_heads=4, patch_size=8, reg_tokens=2,
                                                          global_pool='avg')),
    'a Swin': ('swin_tiny_patch4_window7_224', dict(img_size=32, num_classes=5, embed_dim=16, depths=(1, 1),
                                                    num_heads=(2, 4), window_size=4)),
}


def model_of(name):
    torch.manual_seed(0)
    architecture, arguments = MODELS[name]
    return randomize(timm.create_model(architecture, **arguments)).eval()


@pytest.mark.parametrize('name', ['a ViT with registers', 'a Swin', *(
    pytest.param(name, marks=pytest.mark.grid) for name in ('a ViT', 'a DeiT with a distilled token'))])
def test_no_operator_is_added(name, tmp_path):
    """For a compiler that quantizes by itself; the model stays as it is."""
    model = model_of(name)
    before = copy.deepcopy(model.state_dict())
    for file, fold in (('ln.onnx', False), ('exact.onnx', True)):
        report = mmunorm.export(model, IMAGES[:1], tmp_path / file, 'external', IMAGES, fold=fold)
        assert report.difference.snr['output'] > 80
        assert mmunorm.compare(tmp_path / file, model, IMAGES).snr['output'] > 80
    with_ln, exact = operators_in(tmp_path / 'ln.onnx'), operators_in(tmp_path / 'exact.onnx')
    assert exact['LayerNormalization'] == with_ln['LayerNormalization'] == sum(
        isinstance(module, nn.LayerNorm) for module in model.modules())
    # A norm that writes the stream of a Swin has one linear layer more, and a patch merging a bias.
    assert exact - with_ln == (Counter(MatMul=1, Add=2) if name == 'a Swin' else Counter())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize('name', MODELS)
def test_in_int8_streams_and_heads_are_rotated(name):
    """And keys and values lose a constant; all of it exactly, in float64."""
    model = model_of(name).double()
    images = IMAGES.double()
    expected = model(images).detach()
    report = fold_for(model, 'static', images[:1], images)
    assert report.streams and report.attentions and not report.kept
    torch.testing.assert_close(model(images), expected, rtol=1e-9, atol=1e-11)
    assert any(norm.is_centered for norm in model.modules() if isinstance(norm, FoldedLayerNorm))


def test_in_floating_point_tokens_stay():
    model = model_of('a ViT')
    report = fold_for(model, None, IMAGES[:1], IMAGES)
    assert report.reduced and not report.streams and not report.attentions


def test_a_folded_model_is_taken_as_it_is(tmp_path, capsys):
    model, rotated = model_of('a ViT'), model_of('a ViT')
    fuse_norms(model, example=IMAGES)
    report = mmunorm.export(model, IMAGES[:1], tmp_path / 'm.onnx', 'external', IMAGES)
    assert f'warning: {UNROTATED}' in report.lines and UNROTATED in capsys.readouterr().err
    assert not streams_of(model) and report.plain == 3 and 'norms left: 3, 3 of them without weights' in str(report)
    assert folded_copy(model, None, IMAGES[:1], None) == []
    fuse_norms(rotated, example=IMAGES, rotate='hadamard')
    assert folded_copy(rotated, 'external', IMAGES[:1], IMAGES) == []


def test_a_model_that_cannot_be_folded_is_exported(tmp_path, monkeypatch, capsys):
    model = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.LayerNorm(4)).eval()
    assert folded_copy(model[:1].eval(), None, IMAGES[:1], None) == []  # without norms

    def fails(*args, **kwargs):
        raise RuntimeError('a reason')

    monkeypatch.setattr('mmunorm.deploy.forms.fuse_norms', fails)
    report = mmunorm.export(model, IMAGES[:1], tmp_path / 'm.onnx')
    assert report.norms == 1 and 'warning: the norms are not folded: RuntimeError: a reason' in report.lines
    assert 'the norms are not folded' in capsys.readouterr().err
