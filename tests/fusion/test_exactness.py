"""In what arithmetic the folded model is the unfolded one, and what the padding has to do with it."""
import copy

import pytest
import torch

from mmunorm import fuse_norms
from mmunorm.fusion.padding import NeutralPadding, zero_token

from . import models

PADDED = {
    'ours': (models.swin_classifier, (37, 45)),
    'mmdet': (models.mmdet_detector, (70, 93)),
    'timm': (lambda: models.timm_swin(img_size=(36, 52)), (36, 52)),
}
ALL = {**PADDED, 't2t': (models.t2t_classifier, (21, 30)), 'vit': (models.vit_classifier, (40, 24))}
padded = pytest.mark.parametrize('make, size', PADDED.values(), ids=PADDED)


def errors(model, x, exact, autocast=False):
    """Root mean square and largest error against `exact`, over the largest value."""
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=autocast):
        after = models.outputs(model, x)
    difference = torch.cat([((a.double() - b) / b.abs().max()).flatten() for a, b in zip(after, exact, strict=True)])
    assert difference.isfinite().all()
    return difference.square().mean().sqrt().item(), difference.abs().max().item()


@pytest.mark.parametrize('gamma', ['some', 'tiny'])
@pytest.mark.parametrize('name', ALL)
def test_rounding(name, gamma):
    """float32: 1e-5. bfloat16, as dtype and under autocast: 2.5 times the unfolded model's error."""
    make, size = ALL[name]
    model = models.randomize(make().double(), gamma=gamma)
    x = torch.randn(4, 3, *size).to(memory_format=torch.channels_last)
    exact = models.outputs(model, x.double())
    folded = copy.deepcopy(model).float()
    fuse_norms(folded, strict=True)
    assert errors(folded, x, exact)[1] < 1e-5
    # The attention masks of the OpenMMLab Swins are float32, and so these cannot be cast to bfloat16.
    for dtype, autocast in [(torch.float32, True)] + [(torch.bfloat16, False)] * (name not in ('ours', 'mmdet')):
        cast = copy.deepcopy(model).to(dtype)
        unfolded_error = errors(cast, x.to(dtype), exact, autocast)[0]
        fuse_norms(cast, strict=True)
        assert all(p.dtype == dtype for p in [*cast.parameters(), *cast.buffers()] if p.is_floating_point())
        assert errors(cast, x.to(dtype), exact, autocast)[0] < 2.5 * unfolded_error


@pytest.mark.parametrize('gamma', ['some', 'all', 'tiny', 'none'])
@padded
def test_the_padding_is_what_makes_it_exact(make, size, gamma):
    """With zeros instead of the token, or with no marker where a scale is zero, the output would be wrong."""
    model = models.randomize(make().double(), gamma=gamma)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    kept, before = x.clone(), models.outputs(model, x)
    fuse_norms(model, strict=True)
    assert errors(model, x, before)[1] < 1e-9 and torch.equal(x, kept)
    filled = [module for module in model.modules() if isinstance(module, NeutralPadding)]
    marked = [module for module in filled if module.marker >= 0]
    assert len(filled) == 4 and len(marked) == {'none': 0, 'tiny': 0}.get(gamma, 4)
    if marked:
        markers = [module.marker for module in marked]
        for module in marked:
            module.marker = -1
        assert errors(model, x, before)[1] > 1e-4
        for module, marker in zip(marked, markers, strict=True):
            module.marker = marker
    for module in filled:
        module.pad_value.zero_()
    assert errors(model, x, before)[1] > 1e-4


def test_zero_token():
    scale = torch.tensor([2.0, -0.5, 0.0, 0.0, 0.0, 1e-40, 1e-20, 3.0], dtype=torch.float64)
    shift = torch.tensor([1.0, 2.0, 0.0, 3.0, -4.0, 5.0, 6.0, 0.0], dtype=torch.float64)
    value, marker, undone = zero_token(scale, shift)
    assert undone.tolist() == [False, False, False, True, True, True, True, False]
    assert marker == 3 and value[3] == 1 and value[4] == value[5] == value[6] == 0
    assert value[2] == value[7] == 0
    torch.testing.assert_close((scale * value + shift)[~undone], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize('scale, shift, value', [(0.0, 0.0, 0), (2.0**-20, 1.0, -(2.0**20))])
def test_no_marker_without_need(scale, shift, value):
    """A marker replaces its channel's input, so that only one without a scale can be it."""
    fill = zero_token(torch.tensor([1.0, scale]).double(), torch.tensor([1.0, shift]).double())
    assert fill.marker == -1 and fill.value.tolist() == [-1, value]


def test_scales_beyond_the_dtype():
    """Scales so small that a fill has no place in float32, and larger ones beside them."""
    model = models.randomize(models.swin_classifier().double(), gamma='none')
    with torch.no_grad():
        for norm in map(model.get_submodule, models.norms(model)):
            norm.weight[0], norm.weight[1], norm.weight[2] = 1e-38, -1e-25, 1e25
            norm.bias[2], norm.running_var[2] = 0, 1e50
    x = torch.randn(2, 3, 37, 45)
    exact = models.outputs(model, x.double())
    fuse_norms(model, strict=True)
    assert errors(model, x.double(), exact)[1] < 1e-9
    assert errors(model.float(), x, exact)[1] < 1e-5
