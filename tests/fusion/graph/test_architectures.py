"""Small models of timm, torch, mmpretrain and mmdet without a rule: norms fold, and a checkpoint of them loads."""
import pytest
import torch
from mmengine.config import Config
from torch import nn

from mmunorm import fuse_norms, replace_norms
from mmunorm.fusion import FoldedNorm, folded_config, load_folded, save_folded

from .. import models

VIT = dict(img_size=32, embed_dim=16, depth=2, num_heads=2, patch_size=8)
# Arguments and the number of norms; what stays, by the end of its name.
TIMM = {
    'swinv2_tiny_window8_256': (dict(img_size=32, embed_dim=8, depths=(2, 2), num_heads=(2, 2), window_size=4), 11, ()),
    'beit_base_patch16_224': (VIT, 5, ()),
    'eva02_tiny_patch14_224': (VIT, 5, ()),
    'cait_xxs24_224': (VIT, 9, ()),
    'convnext_atto': (dict(depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)), 9, ()),
    'xcit_nano_12_p16_224': (dict(img_size=32, embed_dim=16, depth=1, num_heads=2), 13,
                             ('norm3', 'bn', 'attn_blocks.0.norm1', 'attn_blocks.0.norm2', 'attn_blocks.1.norm1',
                              'attn_blocks.1.norm2')),
    'twins_svt_small': (dict(embed_dims=(8, 8, 8, 8), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1)), 13,
                        ('0.0.norm1', '1.0.norm1', '2.0.norm1', '3.0.norm1')),
}


def timm_config(name, **kwargs):
    return Config(dict(model=dict(type='TimmModel', name=name, norm_cfg=dict(type='UN'), num_classes=5, **kwargs)))


def fold(model, x):
    models.randomize(model.double())
    before = models.outputs(model, x)
    report = fuse_norms(model, example=x)
    models.assert_equal(models.outputs(model, x), before)
    return report


@pytest.mark.parametrize('name', TIMM)
def test_timm(name, tmp_path):
    """Folds and comes back from its checkpoint with nothing but that."""
    kwargs, count, kept = TIMM[name]
    cfg = timm_config(name, **kwargs)
    model = models.build(cfg.model)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    report = fold(model, x)
    assert len(report.folded) + len(report.kept) == count and len(report.kept) >= len(kept)
    assert all(fold.norm.endswith(kept) for fold in report.kept)

    save_folded(model.float(), report, cfg, tmp_path / 'folded.pth')
    loaded = load_folded(tmp_path / 'folded.pth')
    assert models.norms(loaded) == [fold.norm for fold in report.kept]
    models.assert_equal(models.outputs(loaded, x.float()), models.outputs(model, x.float()), 0)


def test_a_loaded_model_can_be_saved_again_but_is_no_other_architecture(tmp_path):
    cfg = timm_config('beit_base_patch16_224', **VIT)
    model = models.randomize(models.build(cfg.model))
    report = fuse_norms(model, example=torch.randn(1, 3, 32, 32))
    save_folded(model, report, cfg, tmp_path / 'first.pth')
    loaded, second = load_folded(tmp_path / 'first.pth'), cfg.copy()
    second.model = folded_config(cfg.model, ['norm'])
    save_folded(loaded, fuse_norms(loaded), second, tmp_path / 'second.pth')
    again = load_folded(tmp_path / 'second.pth').state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())

    cfg.model.depth = 1
    save_folded(model, report, cfg, tmp_path / 'folded.pth')
    with pytest.raises(ValueError, match='no norm blocks.1.norm1 to fold'):
        load_folded(tmp_path / 'folded.pth')
    torch.save(model.state_dict(), tmp_path / 'plain.pth')
    with pytest.raises(ValueError, match='plain.pth: is no folded checkpoint'):
        load_folded(tmp_path / 'plain.pth')


def test_batch_norm_with_an_activation():
    """It folds into the convolution before it, and leaves its activation."""
    from timm.layers import BatchNormAct2d
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), BatchNormAct2d(4, act_layer=nn.SiLU),
                          BatchNormAct2d(4), BatchNormAct2d(4, apply_act=False), nn.Conv2d(4, 4, 1))
    report = fold(model, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert [fold.where for fold in report.folded] == ['back into 0', '4'] and isinstance(model[1], FoldedNorm)
    assert report.kept[0].where.startswith('its output goes through its activation; its input is not that of linear')


def test_torch_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
    report = fold(replace_norms(model, dict(type='UN')), torch.randn(2, 5, 8, dtype=torch.float64))
    assert [fold.norm for fold in report.kept] == ['norm'] and len(report.folded) == 4


@pytest.mark.parametrize('backbone, neck', [
    (dict(type='ConvNeXt', arch=dict(depths=[1] * 4, channels=[8, 8, 8, 16])), False),
    (dict(type='ConvNeXt', arch=dict(depths=[1] * 4, channels=[8, 8, 8, 16]), linear_pw_conv=False), False),
    (dict(type='SwinTransformerV2', img_size=32, window_size=4, out_indices=(1, ),
          arch=dict(embed_dims=8, depths=[1, 1], num_heads=[1, 2], extra_norm_every_n_blocks=0)), True),
], ids=['convnext', 'convnext_of_convolutions', 'swin_v2'])
def test_mmpretrain(backbone, neck):
    model = replace_norms(models.classifier(backbone, 16, neck=neck), dict(type='UN'))
    report = fold(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert report.folded and not report.kept, report


def test_a_rule_that_does_not_know_the_readers_leaves_them_to_the_graph():
    """mmdet's Swin tells what it gives away; which layers of this neck read that only the graph says."""
    model = models.detector(backbone=models.mmdet_swin(), type='ChannelMapper', num_outs=2, kernel_size=1)
    report = fold(model, torch.randn(1, 3, 32, 32, dtype=torch.float64))
    where = {fold.norm: fold.where for fold in (*report.folded, *report.kept)}
    assert where['backbone.norm0'] == 'neck.convs.0.conv' and where['backbone.norm1'] == 'neck.convs.1.conv'
