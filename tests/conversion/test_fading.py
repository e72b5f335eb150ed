"""A norm that is LayerNorm first and an offline norm in the end."""
import copy
import math

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn
from torch.nn import functional as F

from mmunorm import convert_norms, fuse_norms, replace_norms
from mmunorm.compat import sees_attributes
from mmunorm.conversion.fading import FadingNorm, drop_faded, fading_order
from mmunorm.norms import UN
from mmunorm.norms.layers import norm_layers

from ..fusion.models import build, swin_backbone, t2t_classifier, vit_backbone
from .models import layer_norm, tokens

KINDS = ['FadingUN', 'FadingMABN', 'FadingTokenBN', 'FadingRepBN']
every_kind = pytest.mark.parametrize('kind', KINDS)


def fading(kind, norm, **kwargs):
    """A norm that fades, from a LayerNorm's weights."""
    new = MODELS.build(dict(type=kind, num_features=norm.normalized_shape[0], **kwargs))
    assert not new.load_state_dict(norm.state_dict()).missing_keys
    return new


@every_kind
@pytest.mark.parametrize('training', [True, False])
def test_it_begins_as_layer_norm_exactly(kind, training):
    norm, x = layer_norm(6), tokens(9, 6).requires_grad_()
    new = fading(kind, norm).train(training)
    y, dy = new(x), torch.randn(9, 6)
    expected = norm(x)
    assert torch.equal(y, expected) and not new.has_begun and not new.lacks_statistics
    gradients = torch.autograd.grad(y, [x, new.ln_weight, new.ln_bias], dy)
    for a, b in zip(gradients, torch.autograd.grad(expected, [x, norm.weight, norm.bias], dy), strict=True):
        assert torch.equal(a, b)


@every_kind
def test_it_ends_as_the_offline_norm_exactly(kind):
    new = fading(kind, layer_norm(6))
    plain = MODELS.build(dict(type=kind.removeprefix('Fading'), num_features=6))
    new.set_fade(5, 5)
    state = new.state_dict(prefix='0.')
    drop_faded(state)
    plain.load_state_dict({name[2:]: value.clone() for name, value in state.items()})
    assert plain.state_dict().keys() == {name[2:] for name in state}
    for x in tokens(4, 9, 6):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = new(a), plain(b)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(y, expected) and torch.equal(a.grad, b.grad)
        assert torch.equal(new.weight.grad, plain.weight.grad) and new.ln_weight.grad.eq(0).all()
    assert torch.equal(new.eval()(x), plain.eval()(x))
    assert torch.equal(new.affine()[0], plain.affine()[0]) and new.newest_step is not None


@every_kind
@pytest.mark.parametrize('done', [1, 4, 7])
def test_in_between_it_is_a_blend(kind, done):
    norm, x = layer_norm(6), tokens(9, 6)
    new = fading(kind, norm).eval()
    new.set_fade(8, 8)
    static = new(x)
    new.set_fade(done, 8)
    share = (1 + math.cos(math.pi * done / 8)) / 2
    torch.testing.assert_close(new(x), share * norm(x) + (1 - share) * static)
    assert 'is LayerNorm in part until its fade is over, of which ' in new.fold_obstacle
    assert new.newest_step is None and new.blends_another
    with pytest.raises(RuntimeError, match='no affine map: it is LayerNorm in part'):
        new.affine()


@every_kind
def test_refit_is_the_conversion(kind):
    norm, x = layer_norm(6), tokens(40, 6)
    new = fading(kind, norm)
    new.measures = True
    for part in x.split(16):
        new(part)
    new.refit()
    converted = nn.Sequential(norm, nn.Linear(6, 6))
    convert_norms(converted, [x], dict(type=kind.removeprefix('Fading')))
    for name, value in converted[0].state_dict().items():
        torch.testing.assert_close(new.state_dict()[name], value, msg=name)
    assert new.sums.eq(0).all()


def test_what_is_not_finite_or_padding_is_not_measured():
    norm, x = layer_norm(6), tokens(12, 6)
    new = fading('FadingUN', norm)
    new.measures = True
    pad_mask = torch.zeros(12, dtype=torch.bool)
    new(x[:5])
    new(torch.full((2, 6), torch.inf))
    pad_mask[5:] = True
    new(x.where(~pad_mask[:, None], 1e9), pad_mask)
    once, sums = fading('FadingUN', norm), new.sums.clone()
    once.measures = True
    once(x[:5])
    torch.testing.assert_close(sums, once.sums * 2)
    new.sums.zero_()
    before = copy.deepcopy(new.state_dict())
    new.refit()
    assert all(torch.equal(value, before[name]) for name, value in new.state_dict().items())


@pytest.mark.parametrize('done', [0, 3, 8])
def test_every_parameter_gets_a_gradient(done):
    """As DistributedDataParallel wants it."""
    new = MODELS.build(dict(type='FadingRepBN', num_features=6))
    new.set_fade(done, 8)
    new(tokens(9, 6)).sum().backward()
    assert all(parameter.grad is not None for parameter in new.parameters())


@pytest.mark.parametrize('done', [0, 3])
def test_a_checkpoint_of_a_fading_norm(done):
    norm = fading('FadingUN', layer_norm(6))
    norm.set_fade(done, 8)
    norm.measures = True
    norm(tokens(9, 6))
    norm.measures = False
    state = copy.deepcopy(nn.Sequential(norm).state_dict())
    drop_faded(state)
    assert '0.ln_weight' in state
    loaded = nn.Sequential(MODELS.build(dict(type='FadingUN', num_features=6)))
    loaded.load_state_dict(state)
    x = tokens(7, 6, seed=1)
    assert torch.equal(loaded[0](x), norm(x)) and torch.equal(loaded[0].sums, norm.sums)
    with pytest.raises(RuntimeError, match='0: in this checkpoint the norm is LayerNorm in part. Train on until'):
        nn.Sequential(UN(6)).load_state_dict(state)


def test_a_checkpoint_of_the_offline_norm_has_faded():
    plain = UN(6)
    plain.running_var.fill_(3)
    norm = MODELS.build(dict(type='FadingUN', num_features=6))
    assert not norm.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    assert norm.has_faded and torch.equal(norm.eval()(tokens(4, 6)), plain.eval()(tokens(4, 6)))


def test_a_model_that_is_no_config():
    model = nn.Sequential(layer_norm(6), nn.Linear(6, 6))
    x = tokens(5, 6)
    expected = model(x)
    assert torch.equal(replace_norms(model, dict(type='FadingUN'))(x), expected)


def test_folding():
    model = build(dict(swin_backbone(norm_cfg=dict(type='FadingUN')))).eval()
    assert not fuse_norms(model).folded
    for _, norm in norm_layers(model):
        norm.set_fade(1, 1)
    assert [fold.norm for fold in fuse_norms(model).kept] == ['norm1']  # which a head would read


def test_the_order():
    names = [name for name, _ in norm_layers(build(dict(swin_backbone(out_indices=(0, 1)))))]
    assert fading_order(names) == [
        *(f'stages.{i}.blocks.{j}.norm{k}' for k in (2, 1) for i in (0, 1) for j in (0, 1)),
        'patch_embed.norm', 'stages.0.downsample.norm', 'norm0', 'norm1']
    names = [name for name, _ in norm_layers(build(vit_backbone()))]
    assert fading_order(names) == ['layers.0.ln2', 'layers.1.ln2', 'layers.0.ln1', 'layers.1.ln1', 'ln1']
    names = [name for name, _ in norm_layers(t2t_classifier())]
    parts = [f'backbone.tokens_to_token.attention{i}' for i in (1, 2)] + [f'backbone.encoder.{i}' for i in (0, 1)]
    assert fading_order(names) == [*(f'{part}.ln{k}' for k in (2, 1) for part in parts), 'backbone.norm']
    assert fading_order(['blocks.0.norm1', 'blocks.0.attn.q_norm', 'norm']) == [
        'blocks.0.norm1', 'blocks.0.attn.q_norm', 'norm']


def test_low_precision_and_blend_of_dtypes():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        norm = MODELS.build(dict(type='FadingUN', num_features=6))
        for done in (0, 1, 2):
            norm.set_fade(done, 2)
            assert norm(tokens(5, 6).to(dtype)).dtype == dtype
    assert isinstance(norm, FadingNorm)


def test_eps_is_layer_norms_own():
    x = tokens(5, 6) * 1e-3
    norm = fading('FadingUN', nn.LayerNorm(6, eps=1e-6), ln_eps=1e-6, eps=1e-5)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (6, ), eps=1e-6))


@pytest.mark.slow
@pytest.mark.skipif(not sees_attributes(), reason='this torch compiles a model once, whatever its attributes')
def test_compiled():
    """A compiled model is compiled for LayerNorm, for the blend and for the offline norm, not for each step."""
    compiled = []
    eager = nn.Sequential(nn.Linear(6, 6), fading('FadingUN', layer_norm(6)), nn.Linear(6, 6))
    model = copy.deepcopy(eager)
    fast = torch.compile(model, backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    for done in range(7):
        x = tokens(9, 6, seed=done)
        for each in (eager, model):
            each[1].set_fade(done, 6)
        torch.testing.assert_close(fast(x), eager(x))
    assert len(compiled) <= 4
