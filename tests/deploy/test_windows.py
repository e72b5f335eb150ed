"""The rewritten window attention beside the stock ones, with the padding of a folded norm and without."""
from functools import partial

import pytest
import torch
from mmpretrain.models.utils import ShiftWindowMSA
from mmpretrain.models.utils.attention import scaled_dot_product_attention_pyimpl

from mmunorm import fuse_norms
from mmunorm.deploy.windows import (
    StaticWindowMSA,
    ThreeLayerAttention,
    is_window_attention,
    shifted_window_mask,
    side_multiple,
    with_windows,
)

from ..fusion import models

MAKERS = {
    'ours': lambda: models.swin_classifier(pad_small_map=True),
    'stock': models.stock_swin_classifier,
    'mmdet': lambda: models.detector(backbone=models.mmdet_swin()),
}


@pytest.mark.parametrize('name, fold, gamma', [
    ('ours', False, 'some'), ('ours', True, 'some'), ('stock', True, 'none'), ('mmdet', True, 'none')])
def test_as_the_stock_attention(name, fold, gamma):
    model = models.randomize(MAKERS[name]().double(), gamma=gamma)
    if fold:
        fuse_norms(model, strict=True)
    static = with_windows(model)
    assert sum(isinstance(module, StaticWindowMSA) for module in static.modules()) == 4
    assert not any(is_window_attention(module) for module in static.modules())
    dynamic = with_windows(model, True)
    assert side_multiple(model.backbone) == 8
    for size in ((37, 45), (56, 32), *([(8, 24)] if name != 'stock' else [])):  # a map smaller than a window
        for batch in (1, 2):
            x = torch.randn(batch, 3, *size, dtype=torch.float64)
            expected = models.outputs(model, x)
            models.assert_equal(models.outputs(static, x), expected, 1e-12)
            if size[0] % 8 == size[1] % 8 == 0:
                models.assert_equal(models.outputs(dynamic, x), expected, 1e-12)


@pytest.mark.parametrize('make, blocks', [(models.vit_classifier, 'layers'), (models.t2t_classifier, 'encoder')])
@pytest.mark.parametrize('is_own', [False, True])
def test_global_attention_has_its_scale_in_the_queries(make, blocks, is_own):
    model = models.randomize(make().double())
    if is_own:  # as of a stock layer with a `qk_scale`
        attend = partial(scaled_dot_product_attention_pyimpl, scale=3.)
        getattr(model.backbone, blocks)[0].attn.scaled_dot_product_attention = attend
    rewritten, x = with_windows(model), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    models.assert_equal(models.outputs(rewritten, x), models.outputs(model, x), 1e-12)
    scales = [module.attend.keywords['scale'] for module in rewritten.modules()
              if isinstance(module, ThreeLayerAttention)]
    assert scales == [3 if is_own else 1, 1]


@pytest.mark.parametrize('rows, columns, window, shift', [(1, 1, 4, 2), (2, 3, 4, 2), (3, 1, 7, 3)])
def test_the_mask_of_shifted_windows(rows, columns, window, shift):
    expected = ShiftWindowMSA.get_attn_mask((rows * window, columns * window), window, shift)
    mask = shifted_window_mask(rows, columns, window, shift)
    assert torch.equal(mask, 10 * expected) and set(mask.exp().unique().tolist()) <= {0., 1.}


@pytest.mark.parametrize('make', [models.vit_classifier, models.t2t_classifier,
                                  lambda: models.swin_classifier(use_abs_pos_embed=True)])
def test_a_table_of_positions_fixes_the_size(make):
    assert side_multiple(make().backbone) is None


def test_a_map_smaller_than_a_window_is_refused_where_the_stock_attention_does():
    static = with_windows(models.swin_classifier().eval())
    with pytest.raises(ValueError, match='pad_small_map'):
        static(torch.zeros(1, 3, 20, 20))
