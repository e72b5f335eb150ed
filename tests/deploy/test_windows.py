"""The rewritten window attention beside the stock ones, with the padding of a folded norm and without."""
import copy

import pytest
import torch
from mmpretrain.models.utils import ShiftWindowMSA

from mmunorm import fuse_norms
from mmunorm.deploy.rewrite.windows import (
    DynamicWindowMSA,
    for_any_size,
    is_window_attention,
    shifted_window_mask,
    side_multiple,
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
    dynamic = for_any_size(copy.deepcopy(model))
    assert sum(isinstance(module, DynamicWindowMSA) for module in dynamic.modules()) == 4
    assert not any(is_window_attention(module) for module in dynamic.modules())
    assert side_multiple(model.backbone) == 8
    for size in ((40, 48), (56, 32), *([(8, 24)] if name != 'stock' else [])):  # a map smaller than a window
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        models.assert_equal(models.outputs(dynamic, x), models.outputs(model, x), 1e-12)


@pytest.mark.parametrize('rows, columns, window, shift', [(1, 1, 4, 2), (2, 3, 4, 2), (3, 1, 7, 3)])
def test_the_mask_of_shifted_windows(rows, columns, window, shift):
    expected = ShiftWindowMSA.get_attn_mask((rows * window, columns * window), window, shift)
    mask = shifted_window_mask(rows, columns, window, shift)
    assert torch.equal(mask, 10 * expected) and set(mask.exp().unique().tolist()) <= {0., 1.}


@pytest.mark.parametrize('make', [models.vit_classifier, models.t2t_classifier,
                                  lambda: models.swin_classifier(use_abs_pos_embed=True)])
def test_a_table_of_positions_fixes_the_size(make):
    assert side_multiple(make().backbone) is None
