"""Shared by all backbones: arguments, registry and autocast."""
import copy

import pytest
import torch
from mmdet.registry import MODELS as MMDET_MODELS
from mmpretrain.registry import MODELS as MMPRETRAIN_MODELS
from torch import nn

from mmunorm.backbones import UNSwinTransformer, UNT2TViT

LN = dict(type='LN')
SWIN = dict(arch=dict(embed_dims=8, depths=[2, 3], num_heads=[1, 2]), img_size=32,
            window_size=4, out_indices=(1, ), norm_cfg=LN)
T2T = dict(img_size=32, embed_dims=24, num_layers=3, norm_cfg=LN, t2t_cfg=dict(token_dims=8, use_performer=False),
           layer_cfgs=dict(num_heads=2, feedforward_channels=48))
BACKBONES = dict(swin=(UNSwinTransformer, SWIN), t2t=(UNT2TViT, T2T))


@pytest.mark.parametrize('cls, settings', BACKBONES.values(), ids=BACKBONES)
def test_every_scope_finds_it_and_it_names_a_bad_norm_cfg(cls, settings):
    """And writes to no argument."""
    settings = {key: value for key, value in settings.items() if key != 'norm_cfg'} | dict(out_indices=[1])
    if cls is UNSwinTransformer:
        settings |= dict(patch_cfg=dict(bias=False), stage_cfgs=dict(block_cfgs=dict(ffn_ratio=2.)))
    before = copy.deepcopy(settings)
    for registry in (MMDET_MODELS, MMPRETRAIN_MODELS):
        model = registry.build(dict(settings, type=cls.__name__))
        assert settings == before
        assert type(model) is cls and not any(isinstance(module, nn.LayerNorm) for module in model.modules())
        assert model.train() is model.eval() is model and not any(module.training for module in model.modules())
    for norm_cfg in (None, 'UN', dict(window=4)):
        with pytest.raises(TypeError, match='norm_cfg=.*must be a dict that names its type'):
            cls(**settings, norm_cfg=norm_cfg)


@pytest.mark.parametrize('cls, settings', [
    *BACKBONES.values(), (UNT2TViT, dict(T2T, t2t_cfg=dict(token_dims=8, use_performer=True)))],
    ids=[*BACKBONES, 'performer'])
def test_training_under_bfloat16_autocast(cls, settings):
    model = cls(**{**settings, 'norm_cfg': dict(type='UN', window=2, warmup_iters=0)})
    model.init_weights()
    for _ in range(4):
        model.zero_grad()
        with torch.autocast('cpu', torch.bfloat16):
            output, = model.train()(torch.randn(2, 3, 33, 47))
        output.float().square().mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.float32 and parameter.grad.isfinite().all(), name
    images = torch.randn(2, 3, 32, 32)
    expected, = model.eval()(images)
    with torch.autocast('cpu', torch.bfloat16):
        output, = model(images)
    assert (output - expected).norm() < 0.05 * expected.norm()
