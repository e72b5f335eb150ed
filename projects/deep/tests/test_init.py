import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from scipy import stats
from torch import nn

import mmunorm
from projects.deep.deep import init
from projects.deep.deep.init import (
    ScaledActivation,
    activation_gain,
    keep_second_moment_,
    ntk_parametrize,
    remove_biases,
    sample_,
)
from tests.fusion.models import assert_folds, vit_classifier

ACTIVATIONS = ['ReLU', 'GELU', 'SiLU', 'SELU', 'Tanh']


@pytest.mark.parametrize('distribution, shape', [
    ('normal', stats.norm()), ('uniform', stats.uniform(-3**0.5, 2 * 3**0.5)), ('truncated', None)])
@settings(max_examples=3, deadline=None)
@given(std=st.floats(1e-3, 10))
def test_samplers_have_their_deviation_and_shape(distribution, shape, std):
    torch.manual_seed(0)
    values = (sample_(torch.empty(200, 500, dtype=torch.float64), std, distribution) / std).flatten().numpy()
    assert abs(values.mean()) < 0.02 and abs(values.std() - 1) < 0.01
    if shape is None:
        scale = 1 / stats.truncnorm(-2, 2).std()
        shape = stats.truncnorm(-2, 2, scale=scale)
        assert abs(values).max() <= 2 * scale
    assert stats.kstest(values, shape.cdf).pvalue > 1e-4


@pytest.mark.parametrize('name, constant', [('ReLU', 1.414214), ('GELU', 1.53353), ('SiLU', 1.676532), ('SELU', 1.)])
def test_gains_are_those_of_the_source(name, constant):
    assert activation_gain(getattr(nn, name)()) == pytest.approx(constant, rel=2e-6)


@pytest.mark.parametrize('activation', ACTIVATIONS)
@pytest.mark.parametrize('scaled', [False, True])
def test_100_layers_keep_the_second_moment(activation, scaled):
    """Either the weights or the activations carry the gain.

    GELU and SiLU let a second moment above 1 grow and one below 1 shrink, so that chance alone would carry them away
    in 100 layers of any width: what counts is each layer's own factor for an input of 1.
    """
    torch.manual_seed(0)
    width = 512
    x = torch.randn(128, width)
    function = ScaledActivation(activation) if scaled else getattr(nn, activation)()
    factors = []
    for _ in range(100):
        if activation in ('GELU', 'SiLU'):
            x = x / x.square().mean(-1, keepdim=True).sqrt()
        weight = keep_second_moment_(torch.empty(width, width), None if scaled else activation)
        before = x.square().mean()
        x = function(x @ weight.T) if scaled else function(x) @ weight.T
        factors.append(x.square().mean() / before)
    assert torch.stack(factors).log().mean().abs() < 0.02


def test_modes_and_fans():
    def std(mode, shape):
        return keep_second_moment_(torch.empty(shape), mode=mode).std().item()

    for shape, fan_in, fan_out in (((300, 100), 100, 300), ((40, 20, 5, 5), 500, 1000)):
        assert std('fan_in', shape) == pytest.approx(fan_in**-0.5, rel=0.05)
        assert std('fan_out', shape) == pytest.approx(fan_out**-0.5, rel=0.05)
        assert std('fan_avg', shape) == pytest.approx((2 / (fan_in + fan_out))**0.5, rel=0.05)


def test_errors_name_the_argument():
    weight = torch.empty(2, 2)
    for call, message in (
            (lambda: sample_(weight, 1, 'cauchy'), "distribution must be 'normal', .* got 'cauchy'"),
            (lambda: keep_second_moment_(weight, mode='fan'), "mode must be one of 'fan_in', .* got 'fan'"),
            (lambda: keep_second_moment_(weight, 'relu'), "activation must be None or one of ReLU, .* got 'relu'"),
            (lambda: activation_gain(torch.zeros_like), 'activation: its second moment .* got 0'),
            (lambda: ntk_parametrize(nn.GELU()), 'model: GELU has no nn.Linear'),
            (lambda: ntk_parametrize(ntk_parametrize(nn.Linear(2, 2))), 'weight of the layer is parametrized already')):
        with pytest.raises(ValueError, match=message):
            call()


def test_init_cfg_and_act_cfg():
    init_cfg = dict(type='SecondMoment', layer='Linear', activation='GELU', distribution='truncated', bias=0.5)
    model = MODELS.build(dict(
        type='UNVisionTransformer', img_size=16, patch_size=8, init_cfg=init_cfg,
        arch=dict(embed_dims=96, num_layers=1, num_heads=2, feedforward_channels=192),
        layer_cfgs=dict(act_cfg=dict(type='ScaledActivation', activation='SiLU'))))
    model.init_weights()
    qkv = model.layers[0].attn.qkv
    assert qkv.weight.std().item() == pytest.approx(1.53353 / 96**0.5, rel=0.03)
    assert qkv.bias.eq(0.5).all() and model.ln1.weight.eq(1).all()
    activation = model.layers[0].ffn.layers[0][1]
    assert isinstance(activation, ScaledActivation) and activation.gain == pytest.approx(1.676532)

    class Parts(BaseModule):

        def __init__(self):
            super().__init__(dict(
                type='SecondMoment', layer=['Embedding', 'LayerNorm'], override=dict(name='fc', type='SecondMoment')))
            self.fc, self.norm = nn.Linear(100, 200), nn.LayerNorm(200)
            self.table, self.plain = nn.Embedding(200, 400), nn.LayerNorm(200, elementwise_affine=False)

    parts = Parts()
    parts.init_weights()
    assert parts.fc.weight.std().item() == pytest.approx(0.1, rel=0.03)
    assert not parts.fc.bias.any() and parts.norm.weight.eq(1).all()
    assert parts.table.weight.std().item() == pytest.approx(0.05, rel=0.03)


def test_ntk_computes_the_same_and_learns_otherwise():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 4)).double()
    for layer in (plain[0], plain[2]):
        keep_second_moment_(layer.weight.detach())
    ntk = ntk_parametrize(copy.deepcopy(plain))
    assert abs(ntk[0].parametrizations.weight.original.std().item() - 1) < 0.05
    x = torch.randn(8, 64, dtype=torch.float64)
    torch.testing.assert_close(ntk(x), plain(x), rtol=1e-13, atol=1e-13)
    steps = []
    for model in (plain, ntk):
        before = model[0].weight.detach().clone()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model(x).square().mean().backward()
        optimizer.step()
        steps.append((model[0].weight.detach() - before).abs().mean().item())
    assert steps[0] == pytest.approx(0.01, rel=0.01)  # Adam's first step is its rate
    assert steps[1] == pytest.approx(0.01 / 8, rel=0.01)
    outputs = ntk(x)
    init.undo_ntk(ntk)
    assert type(ntk[0]) is nn.Linear and ntk.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(ntk(x), outputs, rtol=1e-13, atol=1e-13)


def test_ntk_and_models_without_biases_fold():
    model = ntk_parametrize(vit_classifier()).eval()
    with pytest.raises(mmunorm.fusion.NotFoldedError, match='consumed by a layer with a computed weight'):
        mmunorm.fuse_norms(model, strict=True)
    assert_folds(init.undo_ntk(model), (32, 32), count=5)
    model = remove_biases(vit_classifier())
    assert not any(name.endswith('bias') for name, _ in model.named_parameters() if 'ln' not in name)
    assert_folds(model, (32, 32), count=5)
