"""The rules for mmdet's own Swin, FPN and detectors: which layer takes each norm in, and the same maps in float64."""
import pytest

from .. import models

SIZES = [(64, 64), (70, 93)]


@pytest.mark.parametrize('gamma', ['none', 'some', 'all'])
def test_swin_and_fpn(gamma):
    """The second size is padded to whole windows after norm1: zeros would be wrong."""
    report = models.assert_folds(models.mmdet_detector(), *SIZES, count=12, gamma=gamma)
    folded = {fold.norm: fold.where for fold in report.folded}
    block = 'backbone.stages.1.blocks.1'
    assert 'backbone.patch_embed.projection' in folded['backbone.patch_embed.norm']
    assert folded[f'{block}.norm1'].startswith(f'{block}.attn.w_msa.qkv')
    assert folded[f'{block}.norm2'] == f'{block}.ffn.layers.0.0'
    assert folded['backbone.stages.0.downsample.norm'] == 'backbone.stages.0.downsample.reduction'
    assert [folded[f'backbone.norm{i}'] for i in (0, 1)] == [f'neck.lateral_convs.{i}.conv' for i in (0, 1)]


@pytest.mark.parametrize('fpn, kept', [
    (dict(start_level=1), 'backbone.norm0'),  # nothing reads it
    (dict(end_level=0, num_outs=1), 'backbone.norm1'),
    (dict(add_extra_convs='on_input'), 'backbone.norm1'),  # consumed by a convolution that pads with zeros, too
    (dict(start_level=1, add_extra_convs='on_input', num_outs=1), 'backbone.norm0'),
    (dict(add_extra_convs='on_output'), None)])
def test_which_levels_an_fpn_reads(fpn, kept):
    model = models.detector(backbone=models.mmdet_swin(), **fpn)
    models.assert_folds(model, (64, 64), kept=[kept] if kept else ())
