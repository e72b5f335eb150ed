"""Models of OpenMMLab, timm and ours fold without an example; the folded model is the unfolded one, in float64."""
import re

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN
from timm.layers import Attention
from timm.models.vision_transformer import Block, ParallelScalingBlock, ResPostBlock
from torch import nn

from mmunorm import UN, fuse_norms, replace_norms

from . import blocks, models
from .models import t2t_classifier as t2t
from .models import timm_swin, timm_vit
from .models import vit_classifier as vit

EVEN, ODD = (32, 32), (37, 45)
LN = dict(type='LN')
UNREAD, MAXIMUM = 'its output is consumed by nothing', 'its output is consumed by (amax|adaptive_max_pool2d)'
PADS = 'its output is consumed by neck.fpn_convs.2.conv, a 3x3 convolution that pads with zeros'


def swin(channels=16, head='LinearClsHead', **kwargs):
    return models.classifier(models.swin_backbone(pad_small_map=True, **kwargs), channels, head)


# What `test_exactness` does not draw at random.
@pytest.mark.parametrize('make, kwargs, sizes, count', [
    (swin, {}, [EVEN, ODD, (9, 70), (5, 5)], 11),
    (swin, dict(head='MultiLabelLinearClsHead', stage_cfgs=dict(block_cfgs=dict(attn_cfgs=dict(qkv_bias=False)))),
     [ODD], 11),
    (swin, dict(channels=32, out_after_downsample=True,
                arch=dict(embed_dims=8, depths=[1, 1, 1], num_heads=[2, 2, 2])), [(64, 64), (68, 60)], 10),
    (models.stock_swin_classifier, {}, [EVEN, ODD], 11),
    (models.mmdet_detector, {}, [(64, 64), (17, 30)], 12),
    (models.mmdet_detector, dict(patch_norm=False), [(33, 50)], 10),
    (t2t, dict(tokens=dict(use_performer=False)), [EVEN, ODD, (48, 21)], 9),
    (t2t, dict(out_indices=[0, -1]), [EVEN], 9),
    (t2t, dict(with_cls_token=False, out_type='avg_featmap'), [EVEN], 9),
    (vit, dict(out_indices=[0, 1]), [EVEN, (40, 24)], 5),
    *((vit, dict(norm_cfg=norm_cfg), [EVEN], 5) for norm_cfg in (
        dict(type='UN', centered=True, eta=0.0), dict(type='UN', centered='frozen'), dict(type='TokenBN'),
        dict(type='MABN'), dict(type='PN', layer_scale=False), dict(type='RepBN'), dict(type='NoNorm'),
        dict(type='NoNorm', affine=True))),
    (vit, dict(layer_scale_init_value=0.3), [EVEN], 5),
    (vit, dict(qkv_bias=False, head=dict(hidden_dim=3)), [EVEN, (41, 50)], 5),
    (lambda: models.classifier(models.vit_backbone(out_type='featmap'), 16), {}, [(24, 40)], 5),
    (timm_swin, dict(strict_img_size=False), [EVEN, (40, 72), (20, 28)], 11),
    (timm_swin, dict(window_size=(3, 5), img_size=40, always_partition=True), [(40, 40)], 11),
    (timm_vit, dict(dynamic_img_size=True), [EVEN, (48, 24)], 5),
    (timm_vit, dict(class_token=False, global_pool='avg', reg_tokens=2, fc_norm=False), [EVEN], 5),
    (timm_vit, dict(reg_tokens=3, no_embed_class=True), [EVEN], 5),
    (timm_vit, dict(scale_attn_norm=True, scale_mlp_norm=True), [EVEN], 9),
    (timm_vit, dict(qkv_bias=False, init_values=0.3), [EVEN], 5),
    (timm_vit, dict(block_fn=ResPostBlock), [EVEN], 5),
    (timm_vit, dict(block_fn=ParallelScalingBlock), [EVEN], 3),
    (timm_vit, dict(block_fn=Block, qk_norm=True), [EVEN], 9),
])
def test_every_norm_folds(make, kwargs, sizes, count):
    models.assert_folds(make(**kwargs), *sizes, count=count)


@pytest.mark.parametrize('make, kwargs, kept', [
    (models.detector, dict(add_extra_convs='on_input'), {'backbone.norm1': PADS}),
    (models.detector, dict(add_extra_convs='on_output'), {}),
    (models.detector, dict(start_level=1), {'backbone.norm0': UNREAD}),
    (vit, dict(with_cls_token=False, out_type='avg_featmap'),
     {'backbone.ln1': 'its output is consumed by the norm backbone.ln2'}),
    (vit, dict(pre_norm=True), {'backbone.pre_norm': 'its output is consumed by (add|the norm)'}),
    (vit, dict(out_indices=[0]), {'backbone.ln1': UNREAD}),
    (timm_swin, dict(global_pool='catavgmax'), {'norm': MAXIMUM}),
    (timm_swin, dict(num_classes=0), {'norm': 'its output is an output of the model, or stored by it'}),
])
def test_what_stays_and_why(make, kwargs, kept):
    report = models.assert_folds(make(**kwargs), (64, 64) if make is models.detector else EVEN, kept=list(kept))
    assert all(re.match(kept[fold.norm], fold.where) for fold in report.kept), report


def test_layer_norms_that_a_stock_norm_cfg_does_not_reach():
    """They lose their weights, beside the UN of the others."""
    model = swin(type='SwinTransformer')
    names = models.norms(model)
    report = models.fold(model, *(torch.randn(2, 3, *size, dtype=torch.float64) for size in (EVEN, ODD)))
    assert [fold.norm for fold in report.folded] == ['backbone.norm1']
    assert [fold.norm for fold in report.kept] == names[:1] and [fold.norm for fold in report.reduced] == names[1:-1]
    model = t2t(type='T2T_ViT', t2t_cfg=dict(token_dims=8, use_performer=False), out_indices=[-1])
    report = models.fold(model, torch.randn(2, 3, *EVEN, dtype=torch.float64))
    assert [fold.norm for fold in report.reduced] == [
        f'backbone.tokens_to_token.attention{i}.ln{j}' for i in (1, 2) for j in (1, 2)] and len(report.folded) == 5


def test_a_refused_small_map_is_refused_after_folding():
    model = models.randomize(models.swin_classifier())
    for _ in range(2):
        with pytest.raises(AssertionError, match='smaller than the window'):
            model(torch.randn(1, 3, 20, 12))
        fuse_norms(model, strict=True)


@pytest.mark.parametrize('head, where', [
    (dict(), 'head.layers.head, head.layers.head_dist'), (dict(hidden_dim=6), 'head.layers.pre_logits')])
def test_distilled_deit(head, where):
    report = models.assert_folds(models.deit_classifier(head=head), EVEN, count=5)
    assert {fold.norm: fold.where for fold in report.folded}['backbone.ln1'] == where


@pytest.mark.parametrize('norm_cfg', [
    dict(type='PN', layer_scale=True), dict(type='RMSN'), dict(type='DyT')], ids=str)
def test_every_online_norm_stays_for_its_own_reason(norm_cfg):
    model = models.swin_classifier(norm_cfg)
    report = models.assert_folds(model, EVEN, ODD, kept=models.norms(model))
    assert {fold.where for fold in report.kept} == {
        f'{norm_cfg["type"]} {model.get_submodule(fold.norm).fold_obstacle}' for fold in report.kept}


@pytest.mark.parametrize('add_identity', [False, True])
def test_an_ffn_that_adds_its_input_reads_it_twice(add_identity):
    ffn = FFN(embed_dims=8, feedforward_channels=12, add_identity=add_identity)
    model = blocks.Block(lambda self, x: x + self.ffn(self.norm(x)), dict(norm=UN(8), ffn=ffn))
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    assert len(models.fold(model, x, example=x).kept) == add_identity


def other_head():
    """With the names of timm's head."""
    parts = dict(global_pool=nn.Identity(), fc=nn.Linear(16, 5))
    return blocks.Block(lambda self, x: self.fc(x.amax((1, 2)).relu()), parts)


@pytest.mark.parametrize('make, head', [
    (timm_vit, lambda: nn.Sequential(nn.ReLU(), nn.Linear(16, 5))), (timm_swin, other_head)])
def test_another_head_of_timm(make, head):
    model = make()
    model.head = head()
    models.assert_folds(model, EVEN, kept=['norm'])


def test_timms_gated_attention_keeps_its_own_norm():
    model = timm_vit(norm_cfg=None, depth=1)
    model.blocks[0].attn = Attention(16, gated=True, scale_norm=True, norm_layer=nn.LayerNorm, num_heads=2)
    report = models.assert_folds(replace_norms(model, models.UN), EVEN, count=3, kept=['blocks.0.attn.norm'])
    assert 'blocks.0.attn.gate, blocks.0.attn.qkv' in [fold.where for fold in report.folded]
