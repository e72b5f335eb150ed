"""Post-norm networks lose every norm; factors of residual schemes fold into adjacent layers."""
import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.registry import MODELS
from mmpretrain.models.utils import ShiftWindowMSA
from torch.nn.utils import parametrizations

from mmunorm import fuse_norms
from mmunorm.checkpoints.folded import folded_config, folding_of
from mmunorm.fusion import NotFoldedError
from projects.deep.deep.residuals import RESIDUALS
from projects.deep.deep.residuals.base import FoldedResidual
from tests.fusion import models
from tests.fusion.models import UN, assert_equal, assert_folds, norms, outputs, randomize

POST = ('PostNorm', 'DeepNorm', 'BranchNorm', 'Admin', 'DSInit')
WITHOUT_NORM = ('RFixup', 'ReZero', 'ScaledResidual', 'TFixup')


def vit_cfg(scheme, depth=2, norm_cfg=UN, **kwargs):
    arch = dict(embed_dims=16, num_layers=depth, num_heads=2, feedforward_channels=24)
    norm_cfg = dict(type='NoNorm') if scheme in WITHOUT_NORM else norm_cfg
    backbone = models.vit_backbone(norm_cfg, type='UNVisionTransformer', arch=arch, residual_cfg=dict(type=scheme),
                                   **kwargs)
    return models.classifier_cfg(backbone, 16, 'VisionTransformerClsHead', neck=False)


def vit(*args, **kwargs):
    return models.build(vit_cfg(*args, **kwargs))


def swin_cfg(scheme, **kwargs):
    backbone = models.swin_backbone(type='ResidualSwinTransformer', residual_cfg=dict(type=scheme), **kwargs)
    return models.classifier_cfg(backbone, 16)


def swin(scheme, **kwargs):
    return models.build(swin_cfg(scheme, **kwargs))


def prepared(model):
    """Random factors of the schemes, and BranchNorm in the middle of its ramp."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith('updates'):
            tensor.fill_(1500)
        elif 'residual' in name and '.norm.' not in name or '.scale.' in name:
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model


@pytest.mark.parametrize('scheme', POST)
def test_every_norm_of_a_post_norm_vit_folds(scheme):
    assert_folds(prepared(vit(scheme, 3)), (32, 32), (24, 40), count=6, gamma='none')


@pytest.mark.parametrize('kwargs, number', [
    (dict(final_norm=True), 5), (dict(out_type='avg_featmap'), 5), (dict(pre_norm=True), 4),
    (dict(out_type='avg_featmap', with_cls_token=False), 5)])
def test_consumers_of_the_stream(kwargs, number):
    kept = ['backbone.pre_norm'] if 'pre_norm' in kwargs else []
    assert_folds(prepared(vit('BranchNorm', **kwargs)), (32, 32), count=number, gamma='none', kept=kept)


@pytest.mark.parametrize('scheme', ['PostNorm', 'BranchNorm'])
def test_every_norm_of_other_post_norm_backbones_folds(scheme):
    assert_folds(prepared(swin(scheme, pad_small_map=True)), (32, 32), (37, 51), (60, 20), count=11, gamma='none')
    residual_cfg = dict(type=scheme)
    backbone = models.swin_backbone(type='ResidualSwinTransformer', out_indices=(0, 1), pad_small_map=True,
                                    residual_cfg=residual_cfg)
    assert_folds(prepared(models.detector(backbone=backbone)), (64, 64), (37, 51), count=12, gamma='none')
    for final_norm in (False, True):
        model = models.t2t_classifier(type='ResidualT2TViT', final_norm=final_norm, residual_cfg=residual_cfg)
        assert_folds(prepared(model), (32, 32), count=8 + final_norm, gamma='none')


@pytest.mark.parametrize('build', [vit, swin])
@pytest.mark.parametrize('scheme', sorted(set(RESIDUALS.module_dict) - {*POST, 'DLCL'}))
def test_the_norms_and_factors_of_every_other_scheme_fold(scheme, build):
    kwargs = dict(norm_cfg=dict(type='NoNorm')) if scheme in WITHOUT_NORM and build is swin else {}
    model = prepared(build(scheme, **kwargs))
    assert_folds(model, (32, 32), gamma='some' if scheme != 'ResPostNorm' else 'none')
    kept = [name for name, parameter in model.named_parameters() if 'residual' in name]
    assert kept == []
    has_factor = scheme in ('LayerScale', 'RFixup', 'ReZero', 'SkipInit', 'ScaledResidual')
    assert any(isinstance(module, FoldedResidual) for module in model.modules()) == has_factor


@settings(max_examples=8, deadline=None)
@given(scheme=st.sampled_from(POST), depth=st.integers(1, 8), seed=st.integers(0, 10**6),
       norm=st.sampled_from(['UN', 'TokenBN', 'RepBN', 'MABN']))
def test_folding_is_exact_for_schemes_depths_and_statistics(scheme, depth, seed, norm):
    model = prepared(vit(scheme, depth, dict(type=norm)))
    # As in trained networks, no channel of a norm is near 0.
    randomize(model.double(), seed, 'none')
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(('ln1.weight', 'ln2.weight')):
                parameter.copy_(parameter.sign() * (0.2 + parameter.abs()))
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    before = outputs(model, images)
    fuse_norms(model, strict=True)
    assert_equal(outputs(model, images), before, 1e-8)


def randomize_norms(model, images):
    """Each norm has the statistics of its input, and scales near 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(('ln1.weight', 'ln2.weight')):
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith(('ln1.bias', 'ln2.bias', 'pos_embed', 'cls_token', 'head.weight')):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.train()
        model(images)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize('depth', [32, pytest.param(96, marks=pytest.mark.grid)])
def test_deep_networks(depth):
    """Exact in float64, and in float32 within 1e-4 of float64, where the network before folding is."""
    model = prepared(vit('BranchNorm', depth, dict(type='UN', alpha=0.)))  # statistics of the last step
    images = torch.randn(8, 3, 32, 32)
    single = randomize_norms(model, images)
    model = copy.deepcopy(single).double()
    before = outputs(model, images.double())
    assert_equal([output.double() for output in outputs(single, images)], before, 1e-4)
    assert len(fuse_norms(model, strict=True).folded) == len(fuse_norms(single, strict=True).folded) == 2 * depth
    assert_equal(outputs(model, images.double()), before, 1e-12)
    assert_equal([output.double() for output in outputs(single, images)], before, 1e-4)


def test_streams_beyond_the_range_are_kept():
    for dtype, gamma in ((torch.float16, 0.05), (torch.float32, 1e-5)):
        model = randomize(vit('PostNorm', 3), gamma='none')
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(('ln1.weight', 'ln2.weight')):
                    parameter.fill_(gamma)
        model.to(dtype)
        state = copy.deepcopy(model.state_dict())
        report = fuse_norms(model)
        assert not report.folded and len(report.kept) == 6
        assert f'exceeds the range of {str(dtype)[6:]}' in report.kept[0].where
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        fuse_norms(model.to(torch.bfloat16).double(), strict=True)


@pytest.mark.parametrize('gamma, beta, range_', [
    (1e-3, 0., 'scales of [0-9.]+e-'), (1e3, 0., r'scales of [0-9.]+e\+.* to [0-9.]+e\+0[5-9]'),
    (1., 1e4, r'up to [0-9.]+e\+0[4-9]')])
def test_each_end_of_the_range(gamma, beta, range_):
    model = randomize(vit('PostNorm', 2), gamma='none')
    with torch.no_grad():
        for norm in map(model.get_submodule, norms(model)):
            norm.weight.fill_(gamma)
            norm.bias.fill_(beta)
            norm.running_var.fill_(1)
    kept = fuse_norms(model.half()).kept
    assert len(kept) == 4 and re.search(f'{range_}.*, which exceeds the range of float16', kept[0].where)


def with_another_sum():
    """A linear layer that consumes the middle of the stream."""
    model = vit('PostNorm')
    layer = model.backbone.layers[0]
    layer.other = torch.nn.Linear(16, 16)
    layer.register_forward_hook(lambda module, args, y: y + module.other(y))
    return model


def with_a_hook():
    model = vit('PostNorm')
    model.backbone.layers[1].attn.qkv.register_forward_hook(lambda *args: None)
    return model


def with_a_shared_layer():
    model = vit('PostNorm')
    model.backbone.layers[1].ffn.layers[1] = model.backbone.layers[0].ffn.layers[1]
    return model


def with_a_hook_of_a_sum():
    model = vit('PostNorm')
    model.backbone.layers[0].residual1.register_forward_hook(lambda *args: None)
    return model


def without_a_norm():
    model = vit('PostNorm')
    model.backbone.layers[0].ln2 = torch.nn.Identity()
    return model


def with_a_parametrized_layer():
    model = vit('PostNorm')
    parametrizations.weight_norm(model.backbone.layers[0].ffn.layers[1])
    return model


def with_padded_windows():
    """No rule describes it."""
    class OtherAttention(ShiftWindowMSA):
        @staticmethod
        def get_attn_mask(*args, **kwargs):
            return None

    model = swin('PostNorm', pad_small_map=True)
    model.backbone.stages[0].blocks[1].attn.__class__ = OtherAttention
    return model


@pytest.mark.parametrize('make, gamma, why', [
    (lambda: vit('PostNorm'), 'some', 'the scale of backbone.layers.0.ln1 is 0 in some channel'),
    (lambda: vit('PostNorm', layer_cfgs=[{}, dict(norm_cfg=dict(type='LN'))]), 'none',
     'cannot be folded past backbone.layers.1.ln1: its output is consumed by add'),
    (with_a_hook, 'none', 'its output is consumed by backbone.layers.1.attn.qkv, which has forward hooks'),
    (with_a_shared_layer, 'none', 'backbone.layers.0.ffn.layers.1 is shared with backbone.layers.1.ffn.layers.1'),
    (with_a_hook_of_a_sum, 'none', 'backbone.layers.0.residual1 has forward hooks'),
    (without_a_norm, 'none', 'norms that fold with it are folded already'),
    (with_a_parametrized_layer, 'none', 'backbone.layers.0.ffn.layers.1 has a parametrized weight'),
    (with_padded_windows, 'none', 'its output is padded by 0 at this input size'),
    (with_another_sum, 'none', 'backbone.layers.0.ln2 .UN.: its output is consumed by add'),
    (lambda: vit('PostNorm').backbone, 'none', 'is an output of the model'),
    (lambda: vit('PostNorm', out_indices=[0, 1]), 'none', 'its output is consumed by add')])
def test_refused_with_the_reason(make, gamma, why):
    with pytest.raises(NotFoldedError, match=why):
        fuse_norms(randomize(make(), gamma=gamma), strict=True)


def test_another_linear_layer_may_consume_a_stream():
    model = vit('PostNorm')
    layer = model.backbone.layers[0]
    layer.other, outputs_of_other = torch.nn.Linear(16, 16), []
    layer.register_forward_hook(lambda module, args, y: outputs_of_other.append(module.other(y)))
    models.fold(model, torch.randn(2, 3, 32, 32, dtype=torch.float64), gamma='none', strict=True)
    assert_equal(outputs_of_other[-1:], outputs_of_other[:1])


def test_a_stream_whose_end_is_read_by_nothing_stays():
    def run(model):  # what reads its features is not known
        model(torch.zeros(1, 3, 32, 32).to(next(model.parameters())))

    kept = fuse_norms(randomize(vit('PostNorm').backbone, gamma='none'), example=run).kept
    assert len(kept) == 4 and kept[-1].where == 'its output is consumed by nothing'


@pytest.mark.parametrize('cfg', [
    vit_cfg('BranchNorm'), vit_cfg('ReZero'), vit_cfg('ScaledResidual'), swin_cfg('PostNorm', pad_small_map=True)],
    ids=['branch_norm', 're_zero', 'scaled', 'swin'])
def test_a_folded_checkpoint_builds_its_own_structure(cfg):
    model = randomize(prepared(MODELS.build(cfg)), gamma='none')
    fuse_norms(model, strict=True)
    if cfg.backbone.residual_cfg.type == 'PostNorm':
        cfg.backbone.norm_cfg = dict(type='LN')  # without its norms the architecture is the same
    loaded = MODELS.build(folded_config(cfg, folding_of(model)))
    loaded.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, *((37, 51) if 'Swin' in cfg.backbone.type else (32, 32)))
    assert_equal(outputs(loaded.eval(), images), outputs(model, images), 0)
    assert norms(loaded) == []


def test_mixed_outputs_of_dlcl_are_kept():
    kept = ['backbone.layers.0.residual1.mix_norm', 'backbone.layers.1.residual1.mix_norm',
            'backbone.layers.1.residual2.mix_norm']
    report = assert_folds(prepared(vit('DLCL')), (32, 32), count=5, kept=kept)
    assert all('its output is consumed by' in fold.where for fold in report.kept)


@pytest.mark.parametrize('scheme', ['LayerScale', 'ReZero'])
def test_a_factor_after_a_shared_layer_is_kept(scheme):
    model = prepared(vit(scheme))
    layers = model.backbone.layers
    layers[1].ffn.layers[1] = layers[0].ffn.layers[1]
    layers[1].residual1.register_forward_hook(lambda *args: None)
    models.fold(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert [isinstance(residual, FoldedResidual) for layer in layers for residual in (layer.residual1, layer.residual2)
            ] == [True, False, False, False]


def test_a_factor_before_a_kept_norm_is_kept():
    """A custom scheme: the norm would cancel the factor."""
    model = prepared(vit('LayerScale'))
    model.backbone.layers[1].residual1.norm = torch.nn.LayerNorm(16)
    report = models.fold(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert [fold.norm for fold in report.kept] == ['backbone.layers.1.residual1.norm'] and not report.reduced
    assert [isinstance(residual, FoldedResidual) for layer in model.backbone.layers
            for residual in (layer.residual1, layer.residual2)] == [True, True, False, True]


def test_a_kept_norm_keeps_its_branch_weight():
    model = randomize(prepared(vit('BranchNorm', norm_cfg=dict(type='LN'))))
    state = copy.deepcopy(model.state_dict())
    assert not fuse_norms(model, layer_norms='keep').folded
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize('keep', [lambda y: y * 2, lambda y: y + y, copy.deepcopy])
def test_a_hook_that_reads_a_residual_stream_keeps_its_norms(keep):
    model, features = vit('PostNorm'), []
    model.backbone.layers[0].register_forward_hook(lambda module, args, y: features.append(keep(y)))
    report = models.fold(model, torch.randn(2, 3, 32, 32, dtype=torch.float64), gamma='none')
    assert 'backbone.layers.0.ln2' in [fold.norm for fold in report.kept]
    models.assert_equal(features[-1:], features[:1])
