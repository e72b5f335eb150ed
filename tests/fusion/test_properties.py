"""Folded equals unfolded over random architectures, sizes and statistics."""
import copy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmunorm import fuse_norms

from . import models

few = settings(max_examples=6, deadline=None, derandomize=True, database=None,
               suppress_health_check=list(HealthCheck))
GAMMA = st.sampled_from(['some', 'all', 'tiny', 'none'])
SEED = st.integers(0, 1000)
SIDE = st.integers(8, 50)


@st.composite
def swins(draw):
    """Depths (odd blocks are shifted), heads, width and window of a Swin with one to three stages."""
    num_stages = draw(st.integers(1, 3))
    depths = draw(st.lists(st.integers(1, 3), min_size=num_stages, max_size=num_stages))
    heads = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=num_stages, max_size=num_stages))
    arch = dict(embed_dims=4 * draw(st.integers(1, 3)), depths=depths, num_heads=heads)
    return arch, draw(st.integers(2, 6))


@few
@given(swins=swins(), height=SIDE, width=SIDE, gamma=GAMMA, seed=SEED, qkv_bias=st.booleans())
def test_swin(swins, height, width, gamma, seed, qkv_bias):
    arch, window = swins
    last = len(arch['depths']) - 1
    stages = dict(block_cfgs=dict(attn_cfgs=dict(qkv_bias=qkv_bias)))
    backbone = models.swin_backbone(arch=arch, window_size=window, out_indices=(last, ), pad_small_map=True,
                                    stage_cfgs=stages)
    model = models.classifier(backbone, arch['embed_dims'] * 2**last)
    models.assert_folds(model, (height, width), gamma=gamma, seed=seed, count=2 * sum(arch['depths']) + last + 2)


@few
@given(swins=swins(), height=SIDE, width=SIDE, gamma=GAMMA, seed=SEED, kind=st.sampled_from(['UN', 'TokenBN']))
def test_mmdet_swin_and_fpn(swins, height, width, gamma, seed, kind):
    arch, window = swins
    stages = range(len(arch['depths']))
    backbone = models.mmdet_swin(dict(type=kind), **arch, window_size=window, strides=(4, 2, 2, 2)[:len(stages)],
                                 out_indices=tuple(stages))
    model = models.detector(backbone=backbone, in_channels=[arch['embed_dims'] * 2**i for i in stages],
                            num_outs=len(stages))
    models.assert_folds(model, (height, width), gamma=gamma, seed=seed,
                        count=2 * sum(arch['depths']) + 2 * len(stages))


@few
@given(swins=swins(), height=st.integers(4, 12), width=st.integers(4, 12), gamma=GAMMA, seed=SEED,
       partition=st.booleans(), strict=st.booleans())
def test_timm_swin(swins, height, width, gamma, seed, partition, strict):
    arch, window = swins
    size = (4 * height, 4 * width)
    model = models.timm_swin(img_size=size, embed_dim=arch['embed_dims'], depths=arch['depths'],
                             num_heads=arch['num_heads'], window_size=window, always_partition=partition,
                             strict_img_size=strict)
    sizes = [size] if strict else [size, (4 * width, 4 * height + 8)]
    models.assert_folds(model, *sizes, gamma=gamma, seed=seed, count=2 * sum(arch['depths']) + len(arch['depths']) + 1)


@few
@given(depth=st.integers(1, 3), heads=st.sampled_from([1, 2, 4]), width=st.integers(1, 4), tokens=st.integers(2, 9),
       performer=st.booleans(), height=st.integers(16, 50), side=st.integers(16, 50), gamma=GAMMA, seed=SEED)
def test_t2t_vit(depth, heads, width, tokens, performer, height, side, gamma, seed):
    channels = 8 * width
    backbone = dict(type='UNT2TViT', img_size=32, embed_dims=channels, num_layers=depth,
                    t2t_cfg=dict(token_dims=tokens, use_performer=performer),
                    layer_cfgs=dict(num_heads=heads, feedforward_channels=2 * channels + 1))
    model = models.classifier(backbone, channels, 'VisionTransformerClsHead', neck=False)
    models.assert_folds(model, (height, side), gamma=gamma, seed=seed, count=2 * depth + 5)


@few
@given(depth=st.integers(1, 3), heads=st.sampled_from([1, 2, 4]), width=st.integers(1, 4), patch=st.integers(3, 9),
       height=SIDE, side=SIDE, gamma=GAMMA, seed=SEED, hidden=st.sampled_from([None, 3]), qkv_bias=st.booleans())
def test_vit(depth, heads, width, patch, height, side, gamma, seed, hidden, qkv_bias):
    channels = 8 * width
    arch = dict(embed_dims=channels, num_layers=depth, num_heads=heads, feedforward_channels=2 * channels + 1)
    backbone = models.vit_backbone(img_size=5 * patch, patch_size=patch, qkv_bias=qkv_bias, arch=arch)
    model = models.classifier(backbone, channels, 'VisionTransformerClsHead', False, hidden_dim=hidden)
    size = (max(height, patch), max(side, patch))
    models.assert_folds(model, size, gamma=gamma, seed=seed, count=2 * depth + 1)


@settings(few, max_examples=12)
@given(kind=st.sampled_from(['ours', 'mmdet', 'timm']),
       dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), exponent=st.floats(-12, 0),
       zero=st.booleans(), seed=SEED)
def test_small_scales_in_every_dtype(kind, dtype, exponent, zero, seed):
    """What is folded in a dtype is finite there and as precise as its weights; what cannot be is kept.

    Computed in float64, from the weights as the dtype holds them.
    """
    model = dict(ours=models.swin_classifier, mmdet=models.mmdet_detector,
                 timm=lambda: models.timm_swin(img_size=(36, 52)))[kind]()
    models.randomize(model, seed, 'none')
    with torch.no_grad():
        for norm in map(model.get_submodule, models.norms(model)):
            norm.weight[::3] *= 10**exponent
            norm.weight[1] *= not zero
    x = torch.randn(2, 3, 36, 52, dtype=torch.float64)
    model.to(dtype)
    exact = models.outputs(copy.deepcopy(model).double(), x)
    report = fuse_norms(model)
    assert all('float16 cannot hold the token' in fold.where for fold in report.kept)
    assert not report.kept or dtype == torch.float16 and not zero and exponent < -2
    models.assert_equal(models.outputs(model.double(), x), exact, 16 * torch.finfo(dtype).eps)


def test_float16_after_float32():
    """The report names what is folded in float32 and must not be cast to float16."""
    model = models.randomize(models.swin_classifier(), gamma='none')
    norm = model.backbone.stages[1].blocks[0].norm1
    with torch.no_grad():
        norm.weight[2], norm.bias[2] = 1e-6, 1
    kept, = fuse_norms(copy.deepcopy(model).half()).kept
    assert kept.norm == 'backbone.stages.1.blocks.0.norm1' and 'float16 cannot hold' in kept.where
    report = fuse_norms(model, strict=True)
    named = [fold.norm for fold in report.folded if 'too large for float16' in fold.where]
    assert named == [kept.norm] and '1 of them with padding too large for float16' in str(report)
    assert not model.half().backbone.stages[1].blocks[0].attn.pad_value.isfinite().all()
