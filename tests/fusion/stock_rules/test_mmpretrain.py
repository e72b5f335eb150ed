"""The rules for mmpretrain's own models: which layer takes each norm in, and the same outputs in float64."""
import pytest

from .. import models

EVEN, ODD = (32, 32), (37, 45)


def where(report):
    return {fold.norm: fold.where for fold in report.folded}


@pytest.mark.parametrize('gamma', ['none', 'some', 'all'])
def test_swin(gamma):
    """The odd size is padded to whole windows after norm1: zeros would be wrong."""
    model = models.stock_swin_classifier()
    folded = where(models.assert_folds(model, EVEN, ODD, count=11, gamma=gamma))
    assert 'backbone.patch_embed.projection' in folded['backbone.patch_embed.norm']
    block = 'backbone.stages.1.blocks.1'
    assert folded[f'{block}.norm1'].startswith(f'{block}.attn.w_msa.qkv')
    assert folded[f'{block}.norm2'] == f'{block}.ffn.layers.0.0'
    assert folded['backbone.stages.0.downsample.norm'] == 'backbone.stages.0.downsample.reduction'
    assert folded['backbone.norm1'] == 'head.fc'


@pytest.mark.parametrize('kwargs, count', [
    (dict(), 5), (dict(head=dict(hidden_dim=6)), 5), (dict(out_type='avg_featmap', final_norm=False), 5)])
def test_vision_transformer(kwargs, count):
    folded = where(models.assert_folds(models.vit_classifier(**kwargs), EVEN, count=count))
    assert folded['backbone.layers.1.ln1'] == 'backbone.layers.1.attn.qkv'
    assert folded['backbone.layers.1.ln2'].startswith('backbone.layers.1.ffn.layers.0.0')
    if 'backbone.ln1' in folded:
        assert folded['backbone.ln1'] == f'head.layers.{"pre_logits" if "head" in kwargs else "head"}'


def test_an_average_that_is_normalized_again_keeps_the_first_norm():
    model = models.vit_classifier(with_cls_token=False, out_type='avg_featmap')
    report = models.assert_folds(model, EVEN, kept=['backbone.ln1'], count=5)
    assert where(report)['backbone.ln2'] == 'head.layers.head'
    assert report.kept[0].where.startswith('its output is consumed by the norm backbone.ln2')


def test_the_last_norm_stays_where_an_earlier_layer_is_the_output():
    models.assert_folds(models.vit_classifier(out_indices=[0]), EVEN, kept=['backbone.ln1'])


def test_distilled_deit_has_two_heads():
    folded = where(models.assert_folds(models.deit_classifier(), EVEN, count=5))
    assert folded['backbone.ln1'] == 'head.layers.head, head.layers.head_dist'


@pytest.mark.parametrize('last', [-1, 0])
def test_t2t_vit(last):
    """Its tokens' norms have no `norm_cfg`, and stay LayerNorm. Nothing reads the final norm after an earlier layer."""
    model = models.t2t_classifier(type='T2T_ViT', tokens=dict(use_performer=False), out_indices=[last])
    kept = [f'backbone.tokens_to_token.attention{i}.ln{j}' for i in (1, 2) for j in (1, 2)]
    folded = where(models.assert_folds(model, EVEN, ODD, kept=kept if last else [*kept, 'backbone.norm']))
    assert folded.get('backbone.norm') == ('head.layers.head' if last else None)
