"""In what arithmetic the folded model is the unfolded one, and what the padding has to do with it."""
import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmunorm import fuse_norms
from mmunorm.fusion.padding import NeutralPadding, zero_token

from . import models

PADDED = {
    'ours': (models.one_stage_swin, (37, 45)),
    'mmdet': (models.mmdet_detector, (37, 45)),
    'timm': (lambda: models.timm_swin(img_size=(36, 52)), (36, 52)),
}
ALL = {**PADDED, 't2t': (models.t2t_classifier, (21, 30)), 'vit': (models.vit_classifier, (40, 24))}

few = settings(max_examples=5, deadline=None, derandomize=True, database=None,
               suppress_health_check=list(HealthCheck))
GAMMA, SEED = st.sampled_from(['some', 'all', 'tiny', 'none']), st.integers(0, 1000)


def errors(model, x, exact, autocast=False):
    """Root mean square and largest error against `exact`, over the largest value."""
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=autocast):
        after = models.outputs(model, x)
    difference = torch.cat([((a.double() - b) / b.abs().max()).flatten() for a, b in zip(after, exact, strict=True)])
    assert difference.isfinite().all()
    return difference.square().mean().sqrt().item(), difference.abs().max().item()


@pytest.mark.parametrize('name, gamma', [*((name, 'some') for name in ALL), ('ours', 'tiny')])
def test_rounding(name, gamma):
    """float32: 1e-5. bfloat16, as dtype and under autocast: 2.5 times the unfolded model's error."""
    make, size = ALL[name]
    model = models.randomize(make().double(), gamma=gamma)
    x = torch.randn(2, 3, *size).to(memory_format=torch.channels_last)
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


@pytest.mark.parametrize('name, gamma', [
    *(('ours', gamma) for gamma in ('some', 'all', 'tiny', 'none')), ('mmdet', 'some'), ('timm', 'some')])
def test_the_padding_is_what_makes_it_exact(name, gamma):
    """With zeros instead of the token, or with no marker where a scale is zero, the output would be wrong."""
    make, size = PADDED[name]
    model = models.randomize(make().double(), gamma=gamma)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    kept, before = x.clone(), models.outputs(model, x)
    fuse_norms(model, strict=True)
    assert errors(model, x, before)[1] < 1e-9 and torch.equal(x, kept)
    filled = [module for module in model.modules() if isinstance(module, NeutralPadding)]
    marked = [module for module in filled if module.marker >= 0]
    padded = 2 if name == 'ours' else 4
    assert len(filled) == padded and len(marked) == (0 if gamma in ('none', 'tiny') else padded)
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
    # A marker replaces its channel's input, so that only one without a scale can be it.
    for scale, shift, value in ((0.0, 0.0, 0), (2.0**-20, 1.0, -(2.0**20))):
        fill = zero_token(torch.tensor([1.0, scale]).double(), torch.tensor([1.0, shift]).double())
        assert fill.marker == -1 and fill.value.tolist() == [-1, value]


def test_scales_beyond_the_dtype():
    """Scales so small that a fill has no place in float32, and larger ones beside them."""
    model = models.randomize(models.one_stage_swin().double(), gamma='none')
    with torch.no_grad():
        for norm in map(model.get_submodule, models.norms(model)):
            norm.weight[0], norm.weight[1], norm.weight[2] = 1e-38, -1e-25, 1e25
            norm.bias[2], norm.running_var[2] = 0, 1e50
    x = torch.randn(2, 3, 37, 45)
    exact = models.outputs(model, x.double())
    fuse_norms(model, strict=True)
    assert errors(model, x.double(), exact)[1] < 1e-9
    assert errors(model.float(), x, exact)[1] < 1e-5


@few
@given(kind=st.sampled_from(sorted(PADDED)), dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
       exponent=st.floats(-12, 0), zero=st.booleans(), seed=SEED)
def test_small_scales_in_every_dtype(kind, dtype, exponent, zero, seed):
    """What is folded in a dtype is finite there and as precise as its weights; what cannot be is kept.

    Computed in float64, from the weights as the dtype holds them.
    """
    model = models.randomize(PADDED[kind][0](), seed, 'none')
    with torch.no_grad():
        for norm in map(model.get_submodule, models.norms(model)):
            norm.weight[::3] *= 10**exponent
            norm.weight[1] *= not zero
    x = torch.randn(2, 3, 36, 52, dtype=torch.float64)
    model.to(dtype)
    exact = models.outputs(copy.deepcopy(model).double(), x)
    report = fuse_norms(model)
    for fold in report.kept:
        scale, shift = model.get_submodule(fold.norm).affine()
        assert 'float16 cannot represent the padding token' in fold.where and dtype == torch.float16
        assert scale.all() and (shift / scale).abs().max() > 4090
    models.assert_equal(models.outputs(model.double(), x), exact, 16 * torch.finfo(dtype).eps)


def test_float16_after_float32():
    """The report names what is folded in float32 and must not be cast to float16."""
    model = models.randomize(models.one_stage_swin(), gamma='none')
    norm = model.backbone.stages[0].blocks[1].norm1
    with torch.no_grad():
        norm.weight[2], norm.bias[2] = 1e-6, 1
    kept, = fuse_norms(copy.deepcopy(model).half()).kept
    assert kept.norm == 'backbone.stages.0.blocks.1.norm1' and 'float16 cannot represent' in kept.where
    report = fuse_norms(model, strict=True)
    named = [fold.norm for fold in report.folded if 'too large for float16' in fold.where]
    assert named == [kept.norm] and '1 of them with padding too large for float16' in str(report)
    assert not model.half().backbone.stages[0].blocks[1].attn.pad_value.isfinite().all()


@st.composite
def swins(draw):
    """Depths (odd blocks are shifted), heads and width of a Swin with one or two stages."""
    num_stages = draw(st.integers(1, 2))
    depths = draw(st.lists(st.integers(1, 2), min_size=num_stages, max_size=num_stages))
    heads = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=num_stages, max_size=num_stages))
    return dict(embed_dims=4 * draw(st.integers(1, 3)), depths=depths, num_heads=heads)


@pytest.mark.parametrize('kind', PADDED)
@settings(few, max_examples=2)
@given(arch=swins(), window=st.integers(2, 6), height=st.integers(2, 12), width=st.integers(2, 12), gamma=GAMMA,
       seed=SEED)
def test_random_swins(kind, arch, window, height, width, gamma, seed):
    size, dims, stages = (4 * height, 4 * width), arch['embed_dims'], tuple(range(len(arch['depths'])))
    if kind == 'ours':
        backbone = models.swin_backbone(arch=arch, window_size=window, out_indices=stages[-1:], pad_small_map=True)
        model = models.classifier(backbone, dims * 2**stages[-1])
    elif kind == 'mmdet':
        backbone = models.mmdet_swin(**arch, window_size=window, strides=(4, 2)[:len(stages)], out_indices=stages)
        model = models.detector(backbone=backbone, in_channels=[dims * 2**i for i in stages], num_outs=len(stages))
    else:
        model = models.timm_swin(img_size=size, embed_dim=dims, depths=arch['depths'], num_heads=arch['num_heads'],
                                 window_size=window)
    count = 2 * sum(arch['depths']) + len(stages) + (len(stages) if kind == 'mmdet' else 1)
    models.assert_folds(model, size, count=count, gamma=gamma, seed=seed)
