"""Every rule for a block of OpenMMLab and ours: the folded model is the unfolded one, in float64."""

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN
from mmengine.config import ConfigDict
from torch import nn

from mmunorm import UN, fuse_norms
from mmunorm.fusion import Into, fold_rule
from mmunorm.norms.layers import is_norm

from . import models

EVEN, ODD = (32, 32), (37, 45)
LN = dict(type='LN')


@pytest.mark.parametrize('gamma', ['some', 'all', 'tiny', 'none'])
def test_swin(gamma):
    assert_none_is_left(
        models.assert_folds(models.swin_classifier(), EVEN, ODD, (64, 33), count=11, gamma=gamma)
    )


def test_stock_swin():
    assert_none_is_left(models.assert_folds(models.stock_swin_classifier(), EVEN, ODD, count=11))


def assert_none_is_left(report):
    assert not report.kept and report.folded


def test_stock_swin_keeps_the_layer_norms_its_norm_cfg_does_not_reach():
    model = models.swin_classifier(type='SwinTransformer')
    kept = [name for name in models.norms(model) if name != 'backbone.norm1']
    report = models.assert_folds(model, EVEN, ODD, count=1, kept=kept)
    assert len(kept) == 10
    assert {fold.where for fold in report.kept} == {'LayerNorm computes its statistics at inference'}


def test_swin_output_norms_that_no_head_reads_stay():
    model = models.swin_classifier(out_indices=(0, 1))
    report = models.assert_folds(model, EVEN, ODD, count=11, kept=['backbone.norm0'])
    assert report.kept[0].where == 'nothing in this model reads it'


def test_swin_without_its_last_layer_among_the_outputs():
    model = models.classifier(models.swin_backbone(out_indices=(0,)), 8)
    report = models.assert_folds(model, EVEN, ODD, count=11)
    assert {fold.norm: fold.where for fold in report.folded}['backbone.norm0'] == 'head.fc'


def test_out_after_downsample():
    arch = dict(embed_dims=8, depths=[1, 1, 1], num_heads=[2, 2, 2])
    backbone = models.swin_backbone(arch=arch, out_indices=(1,), out_after_downsample=True)
    models.assert_folds(models.classifier(backbone, 32), (64, 64), (68, 60))


@pytest.mark.parametrize('size', [(20, 12), (9, 70), (5, 5)])
def test_maps_smaller_than_a_window(size):
    models.assert_folds(models.swin_classifier(pad_small_map=True), size, EVEN)


@pytest.mark.parametrize('gamma', ['some', 'none'])
def test_a_refused_small_map_is_refused_after_folding(gamma):
    model = models.randomize(models.swin_classifier(), gamma=gamma)
    for _ in range(2):
        with pytest.raises(AssertionError, match='smaller than the window'):
            model(torch.randn(1, 3, 20, 12))
        fuse_norms(model, strict=True)


@pytest.mark.parametrize('shape', [dict(window_size=3), dict(window_size=8)])
def test_swin_windows(shape):
    models.assert_folds(models.swin_classifier(pad_small_map=True, **shape), EVEN, ODD, (12, 96))


def test_swin_with_position_table_and_without_qkv_bias():
    stage = dict(block_cfgs=dict(attn_cfgs=dict(qkv_bias=False)))
    model = models.swin_classifier(use_abs_pos_embed=True, stage_cfgs=stage)
    assert model.backbone.stages[0].blocks[0].attn.w_msa.qkv.bias is None
    models.assert_folds(model, EVEN, ODD)


@pytest.mark.parametrize('tokens', [dict(use_performer=True), dict(use_performer=False)])
def test_t2t_vit(tokens):
    models.assert_folds(models.t2t_classifier(tokens=tokens), EVEN, ODD, (48, 21), count=9)


@pytest.mark.parametrize(
    'settings, count, kept',
    [
        (dict(out_indices=[0, -1]), 9, ()),
        (dict(with_cls_token=False, out_type='avg_featmap'), 9, ()),
        (dict(final_norm=False), 8, ()),
    ],
)
def test_t2t_vit_outputs(settings, count, kept):
    models.assert_folds(models.t2t_classifier(**settings), EVEN, ODD, count=count, kept=kept)


def test_stock_t2t_keeps_the_layer_norms_of_its_tokens():
    model = models.t2t_classifier(
        type='T2T_ViT', t2t_cfg=dict(token_dims=8, use_performer=False), out_indices=[-1]
    )
    kept = [f'backbone.tokens_to_token.attention{i}.ln{j}' for i in (1, 2) for j in (1, 2)]
    models.assert_folds(model, EVEN, kept=kept, count=5)


@pytest.mark.parametrize(
    'settings, count, kept',
    [
        (dict(), 5, ()),
        (dict(head=dict(hidden_dim=6)), 5, ()),
        (dict(out_indices=[0, 1]), 5, ()),
        (dict(qkv_bias=False), 5, ()),
        (dict(layer_scale_init_value=0.3), 5, ()),
        (dict(final_norm=False), 4, ()),
        (dict(with_cls_token=False, out_type='avg_featmap'), 5, ['backbone.ln1']),
        (dict(out_type='avg_featmap', final_norm=False), 5, ()),
        (dict(out_type='avg_featmap', out_indices=[0, 1]), 5, ['backbone.ln1']),
        (dict(pre_norm=True), 5, ['backbone.pre_norm']),
        (dict(out_indices=[0]), 4, ['backbone.ln1']),
    ],
)
def test_vit(settings, count, kept):
    models.assert_folds(models.vit_classifier(**settings), EVEN, (40, 24), count=count, kept=kept)


def test_vit_as_a_map_through_pooling():
    model = models.classifier(models.vit_backbone(out_type='featmap'), 16)
    models.assert_folds(model, EVEN, (24, 40), count=5)


@pytest.mark.parametrize('head', [dict(), dict(hidden_dim=6)])
def test_distilled_deit(head):
    report = models.assert_folds(models.deit_classifier(head=head), EVEN, count=5)
    where = {fold.norm: fold.where for fold in report.folded}['backbone.ln1']
    assert where == ('head.layers.pre_logits' if head else 'head.layers.head, head.layers.head_dist')


def test_multi_label_head_and_no_head():
    model = models.classifier(models.swin_backbone(), 16, 'MultiLabelLinearClsHead')
    models.assert_folds(model, EVEN, ODD, count=11)
    headless = models.classifier(models.swin_backbone(), 16)
    headless.head = None
    report = models.assert_folds(headless, EVEN, count=10, kept=['backbone.norm1'])
    assert report.kept[0].where == 'nothing in this model reads it'


@pytest.mark.parametrize(
    'neck, kept, why',
    [
        (dict(), None, ''),
        (dict(norm_cfg=dict(type='GN', num_groups=2), act_cfg=dict(type='ReLU')), None, ''),
        (
            dict(add_extra_convs='on_input'),
            'backbone.norm1',
            'its neighbour neck.fpn_convs.2.conv is a 3x3 '
            'convolution that pads with zeros, which are not normalized',
        ),
        (
            dict(add_extra_convs=True),
            'backbone.norm1',
            'its neighbour neck.fpn_convs.2.conv is a 3x3 '
            'convolution that pads with zeros, which are not normalized',
        ),
        (dict(add_extra_convs='on_output'), None, ''),
        (dict(add_extra_convs='on_lateral', relu_before_extra_convs=True), None, ''),
        (dict(start_level=1), 'backbone.norm0', 'nothing in this model reads it'),
        (dict(end_level=0, num_outs=1), 'backbone.norm1', 'nothing in this model reads it'),
        (
            dict(start_level=1, add_extra_convs='on_input', num_outs=1),
            'backbone.norm0',
            'nothing in this model reads it',
        ),
    ],
)
def test_fpn(neck, kept, why):
    model = models.detector(neck=neck)
    group_norms = [name for name in models.norms(model) if '.gn' in name]
    report = models.assert_folds(model, (70, 93), (17, 30), kept=[*filter(None, [kept]), *group_norms])
    if kept:
        assert {fold.norm: fold.where for fold in report.kept}[kept] == why


def test_the_whole_detector_predicts_the_same():
    model = models.randomize(models.detector().double())
    x = torch.randn(1, 3, 70, 93, dtype=torch.float64)
    with torch.no_grad():
        before = [score for level in model(x, mode='tensor') for score in level]
        fuse_norms(model, strict=True)
        after = [score for level in model(x, mode='tensor') for score in level]
    models.assert_equal(after, before)


@pytest.mark.parametrize(
    'backbone', [models.swin_backbone(out_indices=(0, 1), pad_small_map=True), models.mmdet_swin()]
)
def test_two_stage_detectors(backbone):
    model = models.build(
        dict(
            type='FasterRCNN',
            backbone=dict(backbone),
            neck=dict(type='FPN', in_channels=[8, 16], out_channels=8, num_outs=3),
            rpn_head=dict(
                type='RPNHead',
                in_channels=8,
                feat_channels=8,
                anchor_generator=dict(type='AnchorGenerator', strides=[4, 8, 16], ratios=[1.0], scales=[8]),
            ),
            roi_head=None,
            train_cfg=None,
            test_cfg=ConfigDict(rpn=None),
        ),
        'mmdet',
    )
    models.assert_folds(model, (70, 93), count=12)


@pytest.mark.parametrize('gamma', ['some', 'all', 'tiny', 'none'])
def test_mmdet_swin(gamma):
    models.assert_folds(
        models.detector(backbone=models.mmdet_swin()), (64, 64), (70, 93), (17, 30), count=12, gamma=gamma
    )


def test_mmdet_swin_without_patch_norm():
    model = models.detector(backbone=models.mmdet_swin(patch_norm=False))
    models.assert_folds(model, (64, 64), (33, 50), count=10)


def test_layer_norms_and_group_norms_stay():
    model = models.detector(norm_cfg=LN)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = fuse_norms(model.eval())
    assert not report.folded and len(report.kept) == 12
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    'norm_cfg',
    [
        dict(type='UN', centered=True, eta=0.0),
        dict(type='UN', centered='frozen'),
        dict(type='TokenBN'),
        dict(type='MABN'),
        dict(type='PN', layer_scale=False),
        dict(type='RepBN'),
        dict(type='PRepBN', steps=5),
        dict(type='NoNorm'),
        dict(type='NoNorm', affine=True),
    ],
    ids=str,
)
@pytest.mark.parametrize('make', [models.swin_classifier, models.t2t_classifier, models.vit_classifier])
def test_every_offline_norm_folds(make, norm_cfg):
    report = models.assert_folds(make(norm_cfg=norm_cfg), EVEN)
    assert_none_is_left(report)


@pytest.mark.parametrize(
    'norm_cfg',
    [dict(type='PN', layer_scale=True), dict(type='RMSN'), dict(type='DyT'), dict(type='PRepBN', steps=11)],
    ids=str,
)
def test_every_online_norm_stays_for_its_own_reason(norm_cfg):
    model = models.swin_classifier(norm_cfg)
    norms = models.norms(model)
    report = models.assert_folds(model, EVEN, ODD, kept=norms)
    obstacles = {f'{norm_cfg["type"]} {model.get_submodule(name).fold_obstacle}' for name in norms}
    assert {fold.where for fold in report.kept} == obstacles and len(norms) == 11


def test_norms_of_two_kinds_in_one_model():
    stage = dict(block_cfgs=dict(norm_cfg=LN))
    model = models.swin_classifier(stage_cfgs=stage)
    kept = [f'backbone.stages.{i}.blocks.{j}.norm{k}' for i in (0, 1) for j in (0, 1) for k in (1, 2)]
    models.assert_folds(model, EVEN, ODD, count=3, kept=kept)
    assert all(isinstance(model.get_submodule(name), nn.LayerNorm) for name in kept)
    assert sum(map(is_norm, model.modules())) == len(kept)


class Residual(nn.Module):
    """A block whose FFN is left to add its own input."""

    def __init__(self, add_identity):
        super().__init__()
        self.norm = UN(8)
        self.ffn = FFN(embed_dims=8, feedforward_channels=12, add_identity=add_identity)

    def forward(self, x):
        return x + self.ffn(self.norm(x))


@pytest.mark.parametrize('add_identity', [False, True])
def test_an_ffn_that_adds_its_input_reads_it_twice(add_identity):
    fold_rule(Residual)(lambda block: [Into('norm', 'ffn')])
    model = models.randomize(Residual(add_identity).double())
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    expected = model(x)
    report = fuse_norms(model)
    torch.testing.assert_close(model(x), expected)
    assert len(report.kept) == add_identity
