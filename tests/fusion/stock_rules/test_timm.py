"""The rules for timm's Swin, ViT and DeiT: which layer takes each norm in, and the same outputs in float64."""
import pytest
import torch

from mmunorm import fuse_norms

from .. import models

EVEN, ODD = (32, 32), (40, 72)


@pytest.mark.parametrize('gamma', ['none', 'some', 'all'])
def test_swin(gamma):
    """Its blocks roll the map before they pad it to whole windows: zeros would be wrong."""
    model = models.timm_swin(strict_img_size=False)
    report = models.assert_folds(model, EVEN, ODD, (20, 28), count=11, gamma=gamma)
    folded = {fold.norm: fold.where for fold in report.folded}
    block = 'layers.1.blocks.1'
    assert 'patch_embed.proj' in folded['patch_embed.norm']
    assert folded[f'{block}.norm1'].startswith(f'{block}.attn.qkv')
    assert folded[f'{block}.norm2'] == f'{block}.mlp.fc1'
    assert folded['layers.1.downsample.norm'] == 'layers.1.downsample.reduction'
    assert folded['norm'] == 'head.fc'


def test_a_folded_swin_takes_another_input_size():
    model, stock = models.randomize(models.timm_swin().double()), models.timm_swin().double().eval()
    stock.load_state_dict(model.state_dict())
    fuse_norms(model, strict=True)
    for each in (model, stock):
        each.set_input_size((44, 28), window_size=3)
    x = torch.randn(2, 3, 44, 28, dtype=torch.float64)
    models.assert_equal(models.outputs(model, x), models.outputs(stock, x))


@pytest.mark.parametrize('name, kwargs, last', [
    ('vit_tiny_patch16_224', dict(), ('norm', 'head')),
    ('vit_tiny_patch16_224', dict(class_token=False, global_pool='avg'), ('fc_norm', 'head')),
    ('vit_tiny_patch16_224', dict(class_token=False, global_pool='avg', fc_norm=False), ('norm', 'head')),
    ('deit_tiny_distilled_patch16_224', dict(), ('norm', 'head, head_dist'))])
def test_vision_transformers(name, kwargs, last):
    report = models.assert_folds(models.timm_model(name, **kwargs), EVEN, count=5)
    folded = {fold.norm: fold.where for fold in report.folded}
    assert folded['blocks.1.norm1'] == 'blocks.1.attn.qkv' and folded['blocks.1.norm2'] == 'blocks.1.mlp.fc1'
    assert (last[0], folded[last[0]]) == last


@pytest.mark.parametrize('make, kwargs, kept, why', [
    (models.timm_swin, dict(global_pool='catavgmax'), 'norm', 'is consumed by a'),
    (models.timm_vit, dict(global_pool='avgmax', fc_norm=False), 'norm', 'is consumed by a'),
    (models.timm_vit, dict(pre_norm=True), 'norm_pre', '')])
def test_what_stays(make, kwargs, kept, why):
    report = models.assert_folds(make(**kwargs), EVEN, kept=[kept])
    assert why in report.kept[0].where
