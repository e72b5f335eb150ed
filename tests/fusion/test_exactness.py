"""In what arithmetic the folded model is the unfolded one, and what the padding has to do with it."""

import copy

import pytest
import torch

from mmunorm import fuse_norms
from mmunorm.fusion.padding import Fill, zero_token

from . import models

SWIN = 'swin_tiny_patch4_window7_224'
PADDED = {
    'ours': (models.swin_classifier, (37, 45)),
    'mmdet': (lambda: models.detector(backbone=models.mmdet_swin()), (70, 93)),
    'timm': (lambda: models.timm_model(SWIN, img_size=(36, 52)), (36, 52)),
}
ALL = {**PADDED, 't2t': (models.t2t_classifier, (21, 30)), 'vit': (models.vit_classifier, (40, 24))}


def errors(model, x, exact, autocast=False):
    """Root mean square and largest error against `exact`, over the largest value."""
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=autocast):
        differences = [
            (a.double() - b) / b.abs().max() for a, b in zip(models.outputs(model, x), exact, strict=True)
        ]
    difference = torch.cat([each.flatten() for each in differences])
    assert difference.isfinite().all()
    return difference.square().mean().sqrt().item(), difference.abs().max().item()


@pytest.mark.parametrize('gamma', ['some', 'tiny'])
@pytest.mark.parametrize('name', ALL)
def test_rounding(name, gamma):
    """float32: 1e-5. bfloat16, as dtype and under autocast: 2.5 times the unfolded model's error."""
    make, size = ALL[name]
    model = models.randomize(make().double(), gamma=gamma)
    x = torch.randn(4, 3, *size)
    exact = models.outputs(model, x.double())
    folded = copy.deepcopy(model).float()
    fuse_norms(folded, strict=True)
    assert errors(folded, x, exact)[1] < 1e-5

    settings = [(torch.float32, True)]
    # The attention masks of the OpenMMLab Swins are float32, and so these cannot be cast to bfloat16.
    if name not in ('ours', 'mmdet'):
        settings.append((torch.bfloat16, False))
    for dtype, autocast in settings:
        cast = copy.deepcopy(model).to(dtype)
        unfolded_error = errors(cast, x.to(dtype), exact, autocast)[0]
        fuse_norms(cast, strict=True)
        assert all(p.dtype == dtype for p in [*cast.parameters(), *cast.buffers()] if p.is_floating_point())
        assert errors(cast, x.to(dtype), exact, autocast)[0] < 2.5 * unfolded_error


@pytest.mark.parametrize('gamma', ['some', 'all', 'tiny', 'none'])
@pytest.mark.parametrize('name', PADDED)
def test_padding_with_zeros_would_be_wrong(name, gamma, monkeypatch):
    """So that the tests at sizes with window padding can see what is padded."""

    def zeros(scale, shift):
        return Fill(torch.zeros_like(scale), -1, torch.zeros_like(scale, dtype=torch.bool))

    make, size = PADDED[name]
    model = models.randomize(make().double(), gamma=gamma)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    before = models.outputs(model, x)
    exact = copy.deepcopy(model)
    fuse_norms(exact, strict=True)
    assert errors(exact, x, before)[1] < 1e-9
    monkeypatch.setattr('mmunorm.fusion.rewrite.zero_token', zeros)
    fuse_norms(model, strict=True)
    assert errors(model, x, before)[1] > 1e-4


@pytest.mark.parametrize('name', PADDED)
def test_a_marker_left_on_real_tokens_would_be_wrong(name, monkeypatch):
    make, size = PADDED[name]
    model = models.randomize(make().double(), gamma='some')
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    before = models.outputs(model, x)
    fuse_norms(model, strict=True)
    marked = [module for module in model.modules() if getattr(module, 'marker', -1) >= 0]
    assert len(marked) == 4
    for module in marked:
        module.marker = -1
    assert errors(model, x, before)[1] > 1e-4


def test_zero_token():
    scale = torch.tensor([2.0, -0.5, 0.0, 0.0, 0.0, 1e-40, 1e-20, 3.0], dtype=torch.float64)
    shift = torch.tensor([1.0, 2.0, 0.0, 3.0, -4.0, 5.0, 6.0, 0.0], dtype=torch.float64)
    value, marker, undone = zero_token(scale, shift)
    assert undone.tolist() == [False, False, False, True, True, True, True, False]
    assert marker == 3 and value[3] == 1 and value[4] == value[5] == value[6] == 0
    assert value[2] == value[7] == 0
    torch.testing.assert_close((scale * value + shift)[~undone], torch.zeros(4, dtype=torch.float64))


def test_no_marker_without_need():
    """A marker replaces its channel's input, so that only one without a scale can be it."""
    for scale, shift, value in (([1.0, 0.0], [1.0, 0.0], [-1, 0]), ([1.0, 2.0**-20], [1.0, 1.0], [-1, -(2.0**20)])):
        fill = zero_token(torch.tensor(scale).double(), torch.tensor(shift).double())
        assert fill.marker == -1 and fill.value.tolist() == value


def test_scales_beyond_the_dtype():
    """Scales so small that a fill has no place in float32, and larger ones beside them."""
    model = models.randomize(models.swin_classifier().double(), gamma='none')
    for name in models.norms(model):
        norm = model.get_submodule(name)
        with torch.no_grad():
            norm.weight[0], norm.weight[1], norm.weight[2] = 1e-38, -1e-25, 1e25
            norm.bias[2] = 0
            norm.running_var[2] = 1e50
    x = torch.randn(2, 3, 37, 45)
    exact = models.outputs(model, x.double())
    fuse_norms(model, strict=True)
    assert errors(model, x.double(), exact)[1] < 1e-9
    assert errors(model.float(), x, exact)[1] < 1e-5


@pytest.mark.parametrize('name', PADDED)
def test_channels_last_and_strided_input(name):
    make, size = PADDED[name]
    model = models.randomize(make().double())
    x = torch.randn(2, 3, *size, dtype=torch.float64).to(memory_format=torch.channels_last)
    before = models.outputs(model, x)
    kept = x.clone()
    fuse_norms(model, strict=True)
    assert errors(model, x, before)[1] < 1e-9
    assert torch.equal(x, kept)
