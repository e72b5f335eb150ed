"""Shared by all backbones: arguments, registry, and the attributes of a stock backbone."""
import copy

import pytest
import torch
from mmcv.cnn.bricks.drop import DropPath
from mmdet.registry import MODELS as MMDET_MODELS
from mmengine.registry import DefaultScope
from mmpretrain.models import SwinTransformer, T2T_ViT, VisionTransformer
from mmpretrain.registry import MODELS as MMPRETRAIN_MODELS
from torch import nn

from projects.deep.deep import ResidualSwinTransformer, ResidualT2TViT, UNVisionTransformer
from tests.backbones.test_stock import SWIN, T2T

VIT = dict(arch=dict(embed_dims=24, num_layers=3, num_heads=2, feedforward_channels=48), img_size=32, patch_size=8,
           norm_cfg=dict(type='LN', eps=1e-6))
BACKBONES = dict(
    swin=(SwinTransformer, ResidualSwinTransformer, SWIN),
    vit=(VisionTransformer, UNVisionTransformer, VIT),
    t2t=(T2T_ViT, ResidualT2TViT, T2T))


def both(name):
    stock, ours, settings = BACKBONES[name]
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        return stock(**copy.deepcopy(settings), drop_path_rate=0.4), ours(**copy.deepcopy(settings), drop_path_rate=0.4)


def public(module):
    return {name for name in dir(module) if not name.startswith('_')}


@pytest.mark.parametrize('name', BACKBONES)
def test_each_module_has_the_attributes_of_the_stock_one(name):
    stock, ours = both(name)
    probabilities = []
    for path, module in stock.named_modules():
        mine = ours.get_submodule(path)
        assert public(module) <= public(mine), path
        if isinstance(module, DropPath):
            assert mine.drop_prob == pytest.approx(module.drop_prob)
            probabilities.append(mine.drop_prob)
    assert min(probabilities) == 0 and max(probabilities) == pytest.approx(0.4)


@pytest.mark.parametrize('name', ['swin', 'vit'])
def test_stochastic_depth_drops_what_the_stock_one_drops(name):
    """Once, with the probability that `attn` and `ffn` show; in a copy too."""
    stock, ours = both(name)
    ours.load_state_dict(stock.state_dict())
    images, outputs = torch.randn(16, 3, 32, 32), []
    for model in (stock, ours, copy.deepcopy(ours)):
        model.train()
        for module in model.modules():
            if hasattr(module, 'dropout_layer'):
                module.dropout_layer.drop_prob = 0.7
        torch.manual_seed(0)
        outputs.append(model(images)[0])
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[2], outputs[0])


@pytest.mark.parametrize('cls, settings', [(ours, settings) for _, ours, settings in BACKBONES.values()], ids=BACKBONES)
def test_every_scope_finds_it_and_it_names_a_bad_norm_cfg(cls, settings):
    settings = {key: value for key, value in settings.items() if key != 'norm_cfg'}
    for registry in (MMDET_MODELS, MMPRETRAIN_MODELS):
        model = registry.build(dict(copy.deepcopy(settings), type=cls.__name__))
        assert type(model) is cls and not any(isinstance(module, nn.LayerNorm) for module in model.modules())
        assert model.train() is model.eval() is model and not any(module.training for module in model.modules())
    for norm_cfg in (None, 'UN', dict(window=4)):
        with pytest.raises(TypeError, match='norm_cfg=.*must be a dict that names its type'):
            cls(**settings, norm_cfg=norm_cfg)


@pytest.mark.parametrize('cls, settings', [(ours, settings) for _, ours, settings in BACKBONES.values()], ids=BACKBONES)
def test_arguments_are_not_written_to(cls, settings):
    parts = {ResidualSwinTransformer: dict(patch_cfg=dict(bias=False), stage_cfgs=dict(block_cfgs=dict(ffn_ratio=2.)))}
    settings = dict(settings, norm_cfg=dict(type='UN'), residual_cfg=dict(type='BranchNorm', warmup_iters=3),
                    out_indices=[1], **parts.get(cls, {}))
    before = copy.deepcopy(settings)
    cls(**settings)
    assert settings == before


@pytest.mark.parametrize('cls, settings', [(ours, settings) for _, ours, settings in BACKBONES.values()], ids=BACKBONES)
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
