from functools import partial

import pytest
import torch
from mmpretrain.models import T2T_ViT
from mmpretrain.models.utils import MultiheadAttention
from mmpretrain.registry import MODELS as MMPRETRAIN_MODELS
from torch import nn
from torch.nn import functional as F

from mmunorm.backbones import UNT2TViT
from mmunorm.backbones.performer import PerformerLayer
from mmunorm.norms import UN

from .models import assert_equals_stock, count, randomize

SMALL = dict(
    img_size=32, embed_dims=24, num_layers=2,
    layer_cfgs=dict(num_heads=2, feedforward_channels=48))
SOFTMAX = dict(token_dims=8, use_performer=False)
PERFORMER = dict(token_dims=8, use_performer=True)


def test_t2t_vit_14():
    """33 norms of the type that is asked for, and the 21.5 M parameters of arXiv 2101.11986."""
    backbone = MMPRETRAIN_MODELS.build(dict(type='UNT2TViT'))
    stock = UNT2TViT(norm_cfg=dict(type='LN'), t2t_cfg=dict(use_performer=False))
    for model, norm, performers in ((backbone, UN, 2), (stock, nn.LayerNorm, 0)):
        assert count(model, norm) == count(model, (UN, nn.LayerNorm)) == 2 * 14 + 1 + 4 == 33
        assert count(model, PerformerLayer) == performers
    head = MMPRETRAIN_MODELS.build(dict(type='VisionTransformerClsHead', num_classes=1000, in_channels=384))
    parameters = [p for model in (backbone, head) for p in model.parameters()]
    assert sum(p.numel() for p in parameters if p.requires_grad) == sum(p.numel() for p in parameters) == 21_465_806
    assert backbone.pos_embed.numel() == (14 * 14 + 1) * 384
    random_features = [value for name, value in backbone.named_buffers() if name.endswith('attn.w')]
    assert sum(value.numel() for value in random_features) == 2 * 32 * 64


def fixed(stock):
    """mmpretrain's model with the scale of attention that its layers are given and drop."""
    for module in stock.modules():
        if isinstance(module, MultiheadAttention):
            dims = module.input_dims if module.v_shortcut else module.head_dims
            module.scaled_dot_product_attention = partial(F.scaled_dot_product_attention, scale=dims**-0.5)
    return stock


@pytest.mark.parametrize('training, size, out_type', [
    (False, (32, 32), 'cls_token'), (True, (40, 71), 'featmap'), (True, (32, 32), 'avg_featmap'),
    (False, (40, 71), 'raw')])
def test_with_ln_and_softmax_tokens_equals_the_fixed_stock_class(training, size, out_type):
    arguments = dict(**SMALL, t2t_cfg=SOFTMAX, out_type=out_type, norm_cfg=dict(type='LN'))
    stock = fixed(T2T_ViT(**arguments, out_indices=[0, 1]))
    ours = UNT2TViT(**arguments, out_indices=(0, -1))
    assert torch.equal(ours.pos_embed, stock.pos_embed)
    assert_equals_stock(ours, stock, size, training)


@pytest.mark.parametrize('as_list', [False, True])
def test_attention_is_softmax_of_scaled_products(as_list):
    """`softmax(qk_scale * Q K^T) V`; mmpretrain's own divides by the scale."""
    cfg = dict(num_heads=2, feedforward_channels=48, qk_scale=0.5)
    model = randomize(UNT2TViT(**{**SMALL, 'layer_cfgs': [cfg, cfg] if as_list else cfg})).double().eval()
    for layer in model.encoder:
        attention = layer.attn
        x = torch.randn(3, 5, 24, dtype=torch.double)
        q, k, v = attention.qkv(x).view(3, 5, 3, 2, 12).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, scale=0.5)
        torch.testing.assert_close(attention(x), attention.proj(y.transpose(1, 2).reshape(3, 5, 24)))


def test_the_norm_of_a_part_overrides():
    layer_cfgs = [dict(num_heads=2), dict(num_heads=2, norm_cfg=dict(type='LN'))]
    model = UNT2TViT(**{**SMALL, 'layer_cfgs': layer_cfgs})
    assert count(model.encoder[0], UN) == count(model.encoder[1], nn.LayerNorm) == 2
    assert count(model.tokens_to_token, UN) == 4
    model = UNT2TViT(**SMALL, t2t_cfg=dict(norm_cfg=dict(type='LN')))
    assert count(model.tokens_to_token, nn.LayerNorm) == 4
    assert count(model.encoder, UN) == 4


def test_too_small_img_size_is_named():
    with pytest.raises(ValueError, match=r'img_size=\(32, 8\): each side must be at least 16'):
        UNT2TViT(**{**SMALL, 'img_size': (32, 8)})


@pytest.mark.parametrize('t2t_cfg', [PERFORMER, SOFTMAX])
@pytest.mark.parametrize('img_size, size, map_size', [
    ((64, 32), (33, 80), (2, 5)),
    (32, (90, 17), (6, 1)),
])
def test_sizes_that_are_not_square(t2t_cfg, img_size, size, map_size):
    model = UNT2TViT(**{**SMALL, 'img_size': img_size}, t2t_cfg=t2t_cfg, out_type='featmap').eval()
    sides = (img_size, img_size) if isinstance(img_size, int) else img_size
    assert model.pos_embed.shape == (1, sides[0] // 16 * (sides[1] // 16) + 1, 24)
    output, = model(torch.randn(2, 3, *size))
    assert output.shape == (2, 24, *map_size)
    assert output.isfinite().all()


def test_checkpoint_of_another_img_size_loads():
    source = UNT2TViT(**{**SMALL, 'img_size': 64}, t2t_cfg=PERFORMER)
    model = UNT2TViT(**{**SMALL, 'img_size': (48, 96)}, t2t_cfg=PERFORMER)
    model.load_state_dict(source.state_dict(), strict=True)
    assert model.pos_embed.shape == (1, 1 + 3 * 6, 24)
    assert torch.equal(model.pos_embed[:, 0], source.pos_embed[:, 0])


@pytest.mark.parametrize('with_cls_token', [True, False])
def test_initialization_is_that_of_the_stock_config(with_cls_token):
    model = UNT2TViT(
        **{**SMALL, 'embed_dims': 96}, with_cls_token=with_cls_token, out_type='avg_featmap')
    directions = model.tokens_to_token.attention1.attn.w.clone()
    model.init_weights()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert abs(module.weight.std().item() - 0.02) < 0.002, name
            assert module.bias is None or not module.bias.any()
        elif isinstance(module, UN):
            assert module.weight.eq(1).all() and not module.bias.any()
    assert torch.equal(model.tokens_to_token.attention1.attn.w, directions)
    if with_cls_token:
        assert 0.01 < model.cls_token.std().item() < 0.03
    else:
        assert model.cls_token is None
        assert model(torch.randn(1, 3, 32, 32))[0].shape == (1, 96)


def test_performer_dropout_can_be_set():
    def rates(**t2t_cfg):
        blocks = UNT2TViT(**SMALL, t2t_cfg=t2t_cfg).tokens_to_token
        return [rate for block in (blocks.attention1, blocks.attention2)
                for rate in (block.attn.drop.p, block.ffn.dropout_layer.p)]

    assert rates() == [0.1] * 4
    assert rates(performer_drop_rate=0.) == [0.] * 4
