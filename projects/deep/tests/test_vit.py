import pytest
import torch
from mmpretrain.models import VisionTransformer

from mmunorm.fusion import fuse_norms
from mmunorm.norms import UN
from projects.deep.deep import UNVisionTransformer
from tests.backbones.models import assert_equals_stock, count, randomize

ARCH = dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=24)
SMALL = dict(arch=ARCH, img_size=32, patch_size=8)
STOCK_LN = dict(type='LN', eps=1e-6)


@pytest.mark.parametrize('kwargs', [
    dict(out_indices=[0, 2], out_type='featmap'),
    dict(out_type='avg_featmap', with_cls_token=False),
    dict(out_type='raw', final_norm=False, pre_norm=True),
    dict(drop_rate=0.1, drop_path_rate=0.3),
    dict(layer_scale_init_value=0.1, layer_cfgs=dict(ffn_type='swiglu_fused')),
], ids=['maps', 'average', 'raw', 'drops', 'swiglu'])
def test_with_ln_and_pre_norm_equals_the_stock_class(kwargs):
    def copies():  # the stock class modifies its arguments
        return {key: list(value) if isinstance(value, list) else value for key, value in kwargs.items()}

    for training in (False, True):
        assert_equals_stock(UNVisionTransformer(**SMALL, norm_cfg=STOCK_LN, **copies()),
                            VisionTransformer(**SMALL, **copies()), (32, 40), training)


def test_initial_weights_are_the_stock_ones():
    models = []
    for cls, norm in ((VisionTransformer, {}), (UNVisionTransformer, dict(norm_cfg=STOCK_LN))):
        torch.manual_seed(0)
        models.append(cls(**SMALL, **norm, init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02)))
        models[-1].init_weights()
    stock, ours = (model.state_dict() for model in models)
    for name, value in stock.items():
        assert torch.equal(ours[name], value), name


def test_without_biases_it_starts_trains_and_folds():
    model = UNVisionTransformer(**SMALL, bias=False, init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02))
    model.init_weights()
    assert {name.split('.')[-2][:2] for name, _ in model.named_parameters() if name.endswith('bias')} == {'ln'}
    model(torch.randn(2, 3, 32, 32))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    images = torch.randn(2, 3, 32, 32)
    before = model.eval()(images)[0]
    fuse_norms(model)
    assert count(model, UN) == 1  # its consumer, the head, is not in the model
    torch.testing.assert_close(model(images)[0], before, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_another_size_loads():
    stock = randomize(VisionTransformer(**SMALL))
    ours = UNVisionTransformer(**{**SMALL, 'img_size': 48}, norm_cfg=STOCK_LN)
    ours.load_state_dict(stock.state_dict())
    assert ours.pos_embed.shape == (1, 37, 16)


@pytest.mark.parametrize('scheme, number', [
    ('PreNorm', 7), ('PostNorm', 6), ('DeepNorm', 6), ('BranchNorm', 6), ('DSInit', 6), ('Admin', 6), ('SubLN', 13),
    ('NormFormer', 13), ('PeriNorm', 13), ('ResPostNorm', 7), ('LayerScale', 7), ('SkipInit', 7),
    ('DLCL', 11)])
def test_each_scheme_has_its_norms(scheme, number):
    model = UNVisionTransformer(**SMALL, residual_cfg=dict(type=scheme))
    assert count(model, UN) == number


def test_frozen_layers_freeze_their_connections():
    model = UNVisionTransformer(**SMALL, residual_cfg=dict(type='PeriNorm'), frozen_stages=2).train()
    model(torch.randn(2, 3, 32, 32))[0].sum().backward()
    for name, parameter in model.named_parameters():
        frozen = name.startswith(('patch_embed', 'pos_embed', 'cls_token', 'layers.0', 'layers.1'))
        assert (parameter.grad is None) == frozen, name
    assert not model.layers[1].residual1.norm.training and model.layers[2].residual1.norm.training
