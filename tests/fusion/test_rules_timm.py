"""timm's models after `replace_norms`: the folded model is the unfolded one, in float64."""

import pytest
import timm
import torch
from torch import nn

from mmunorm import fuse_norms, replace_norms

from . import models
from .models import assert_folds, timm_model

SWIN, VIT, DEIT = 'swin_tiny_patch4_window7_224', 'vit_tiny_patch16_224', 'deit_tiny_distilled_patch16_224'
SIZE = (32, 32)


@pytest.mark.parametrize('gamma', ['some', 'all', 'tiny', 'none'])
def test_swin_scales(gamma):
    assert_folds(timm_model(SWIN, img_size=(36, 52)), (36, 52), count=11, gamma=gamma)


@pytest.mark.parametrize(
    'settings, sizes',
    [
        (dict(), [SIZE]),
        (dict(img_size=(12, 40)), [(12, 40)]),
        (dict(always_partition=True, img_size=(12, 40)), [(12, 40)]),
        (dict(strict_img_size=False), [SIZE, (40, 72), (20, 28)]),
        (dict(strict_img_size=False, always_partition=True), [SIZE, (40, 72), (12, 60)]),
        (dict(window_size=(3, 5), img_size=40), [(40, 40)]),
    ],
)
def test_swin(settings, sizes):
    assert_folds(timm_model(SWIN, **settings), *sizes, count=11)


@pytest.mark.parametrize(
    'pool, kept', [('avg', []), ('', []), ('max', ['norm']), ('catavgmax', ['norm']), ('avgmax', ['norm'])]
)
def test_swin_pooling(pool, kept):
    report = assert_folds(timm_model(SWIN, global_pool=pool), SIZE, kept=kept)
    assert [fold.where for fold in report.kept] == ['its output goes through a maximum'] * len(kept)


def test_swin_of_another_input_size_after_folding():
    model = models.randomize(timm_model(SWIN).double())
    twin = timm_model(SWIN).double().eval()
    twin.load_state_dict(model.state_dict())
    fuse_norms(model, strict=True)
    for each in (model, twin):
        each.set_input_size((44, 28), window_size=3)
    x = torch.randn(2, 3, 44, 28, dtype=torch.float64)
    models.assert_equal(models.outputs(model, x), models.outputs(twin, x))


@pytest.mark.parametrize('head', [lambda: nn.Identity(), lambda: nn.Sequential(nn.ReLU(), nn.Linear(16, 5))])
@pytest.mark.parametrize('name', [SWIN, VIT])
def test_another_head(name, head):
    model = timm_model(name)
    model.head = head()
    assert_folds(model, SIZE, kept=['norm'])


def test_another_head_with_the_same_names():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.global_pool, self.fc = nn.Identity(), nn.Linear(16, 5)

        def forward(self, x):
            return self.fc(x.amax((1, 2)).relu())

    model = timm_model(SWIN)
    model.head = Head()
    assert_folds(model, SIZE, kept=['norm'])


def test_no_classes():
    assert_folds(timm_model(SWIN, num_classes=0), SIZE, kept=['norm'])
    assert_folds(timm_model(VIT, num_classes=0), SIZE, kept=['norm'])


@pytest.mark.parametrize(
    'settings, count, kept',
    [
        (dict(), 5, []),
        (dict(global_pool='avg'), 5, []),
        (dict(global_pool='avg', fc_norm=False), 5, []),
        (dict(global_pool='max'), 5, []),
        (dict(global_pool='max', fc_norm=False), 4, ['norm']),
        (dict(global_pool='avgmax', fc_norm=False), 4, ['norm']),
        (dict(global_pool='', class_token=False), 5, []),
        (dict(global_pool='map', class_token=False), 4, ['norm', 'attn_pool.norm']),
        (dict(class_token=False, global_pool='avg', reg_tokens=2, fc_norm=False), 5, []),
        (dict(reg_tokens=3, no_embed_class=True), 5, []),
        (dict(qk_norm=True), 5, [f'blocks.{i}.attn.{part}_norm' for i in (0, 1) for part in 'qk']),
        (dict(scale_attn_norm=True), 7, []),
        (dict(scale_mlp_norm=True), 7, []),
        (dict(pre_norm=True), 5, ['norm_pre']),
        (dict(qkv_bias=False, init_values=0.3), 5, []),
        (dict(final_norm=False), 4, []),
    ],
)
def test_vit(settings, count, kept):
    assert_folds(timm_model(VIT, **settings), SIZE, count=count, kept=kept)


def test_vit_of_dynamic_size():
    assert_folds(timm_model(VIT, dynamic_img_size=True), SIZE, (48, 24))


def test_vit_with_other_blocks():
    from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock

    for block in (ResPostBlock, ParallelScalingBlock):
        model = timm_model(VIT, block_fn=block)
        kept = [name for name in models.norms(model) if name.startswith('blocks')]
        assert kept
        assert_folds(model, SIZE, count=1, kept=kept)


def test_gated_attention_keeps_its_own_norm():
    from timm.layers import Attention

    class Gated(Attention):
        def __init__(self, dim, **kwargs):
            super().__init__(dim, gated=True, scale_norm=True, norm_layer=nn.LayerNorm, num_heads=2)

    model = timm.create_model(
        VIT, num_classes=5, img_size=32, embed_dim=16, depth=2, num_heads=2, patch_size=8
    )
    for block in model.blocks:
        block.attn = Gated(16)
    report = assert_folds(
        replace_norms(model, models.UN), SIZE, count=5, kept=[f'blocks.{i}.attn.norm' for i in (0, 1)]
    )
    assert {fold.norm: fold.where for fold in report.folded}[
        'blocks.0.norm1'
    ] == 'blocks.0.attn.qkv, blocks.0.attn.gate'


def test_deit():
    report = assert_folds(timm_model(DEIT), SIZE, count=5)
    assert {fold.norm: fold.where for fold in report.folded}['norm'] == 'head, head_dist'


def test_a_replaced_swin_trains_a_step_and_folds():
    model = timm_model(SWIN, dict(type='UN', warmup_iters=0, window=2)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.tensor([0, 1, 2, 3]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().double()
    assert not torch.equal(model.norm.running_var, torch.ones(16))
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    before = models.outputs(model, x)
    assert len(fuse_norms(model, strict=True).folded) == 11
    models.assert_equal(models.outputs(model, x), before)
