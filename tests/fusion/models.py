"""Small models with offline norms of far from trivial statistics, and the comparison of their outputs."""

import re
from types import SimpleNamespace

import timm
import torch
from mmengine.config import ConfigDict
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mmunorm import fuse_norms, replace_norms
from mmunorm.norms.layers import is_norm

SWIN_ARCH = dict(embed_dims=8, depths=[2, 2], num_heads=[2, 4])
UN, LN = dict(type='UN'), dict(type='LN')


def build(cfg, scope='mmpretrain'):
    with DefaultScope.overwrite_default_scope(scope):
        return MODELS.build(cfg)


def randomize(model, seed=0, gamma='some'):
    """Draws all statistics, scales and shifts, and the biases of linear layers; gives `model` in eval mode.

    Scales are positive and negative. `gamma` says which are special: of each norm a third is zero ('some') or
    as small as 1e-12 ('tiny'), all are zero before each attention ('all'), or none is special ('none').
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor, function=torch.randn, low=0.):
        value = function(tensor.shape, generator=generator, dtype=torch.float64) + low
        tensor.copy_(value.to(tensor.dtype))

    with torch.no_grad():
        for path, module in model.named_modules():
            if not is_norm(module):
                if isinstance(getattr(module, 'bias', None), torch.Tensor):
                    module.bias.copy_(torch.randn(module.bias.shape, generator=generator) * 0.1)
                continue
            for name, value in [*module.named_parameters(), *module.named_buffers()]:
                if name == 'running_var':
                    draw(value, torch.rand, 0.2)
                elif name in ('weight', 'bias', 'running_mean', 'eta', 'ln_weight', 'ln_bias'):
                    draw(value)
                elif name == 'num_batches_tracked':
                    value.fill_(10)
            if getattr(module, 'weight', None) is not None:
                if gamma in ('some', 'tiny'):
                    module.weight[::3] *= {'some': 0, 'tiny': 1e-12}[gamma]
                elif gamma == 'all' and re.search(r'\.\d+\.(norm|ln)1$', path):
                    module.weight.zero_()
        # Class tokens and position tables start at zero.
        for name, parameter in model.named_parameters():
            if name.endswith(('token', 'pos_embed', 'bias_table')) and parameter.requires_grad:
                draw(parameter)
    return model.eval()


def tensors(state_dict):
    """Without the marks of a folded file, which stand for the weights of norms."""
    return {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}


def classifier_cfg(backbone, in_channels, head='LinearClsHead', neck=True, **head_cfg):
    neck = dict(type='mmpretrain.GlobalAveragePooling') if neck else None
    head = dict(type=f'mmpretrain.{head}', num_classes=5, in_channels=in_channels, **head_cfg)
    return ConfigDict(type='mmpretrain.ImageClassifier', backbone=backbone, neck=neck, head=head)


def classifier(*args, **kwargs):
    return build(classifier_cfg(*args, **kwargs))


def swin_backbone(**kwargs):
    return {**dict(type='UNSwinTransformer', arch=SWIN_ARCH, window_size=4, img_size=32, out_indices=(1, ),
                   norm_cfg=UN), **kwargs}


def swin_classifier(norm_cfg=UN, **kwargs):
    """mmunorm's Swin with two stages: 11 norms, window 4, patch 4."""
    return classifier(swin_backbone(norm_cfg=norm_cfg, **kwargs), 16)


def one_stage_swin(depth=2, **kwargs):
    """mmunorm's Swin with one stage of two blocks: 6 norms."""
    arch = dict(embed_dims=8, depths=[depth], num_heads=[2])
    return classifier(swin_backbone(arch=arch, out_indices=(0, ), **kwargs), 8)


def stock_swin_classifier(norm_cfg=UN):
    """mmpretrain's Swin with `norm_cfg` wherever its arguments reach: 11 norms."""
    stage = dict(block_cfgs=dict(norm_cfg=norm_cfg), downsample_cfg=dict(norm_cfg=norm_cfg))
    return swin_classifier(norm_cfg, type='SwinTransformer', stage_cfgs=stage, patch_cfg=dict(norm_cfg=norm_cfg))


def t2t_classifier(norm_cfg=UN, tokens=None, **kwargs):
    """T2T-ViT with Performer tokens and two layers: 9 norms."""
    backbone = dict(type='UNT2TViT', img_size=32, embed_dims=16, num_layers=2, norm_cfg=norm_cfg,
                    t2t_cfg=dict(token_dims=8, **(tokens or {})),
                    layer_cfgs=dict(num_heads=2, feedforward_channels=24))
    return classifier({**backbone, **kwargs}, 16, 'VisionTransformerClsHead', neck=False)


def vit_backbone(norm_cfg=UN, **kwargs):
    arch = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=24)
    return {**dict(type='VisionTransformer', arch=arch, img_size=32, patch_size=8, norm_cfg=norm_cfg), **kwargs}


def vit_classifier(norm_cfg=UN, head=None, **kwargs):
    """mmpretrain's Vision Transformer with two layers: 5 norms."""
    return classifier(vit_backbone(norm_cfg, **kwargs), 16, 'VisionTransformerClsHead', False, **(head or {}))


def deit_classifier(norm_cfg=UN, head=None):
    """mmpretrain's distilled DeiT: 5 norms, two heads."""
    backbone = vit_backbone(norm_cfg, type='DistilledVisionTransformer')
    return classifier(backbone, 16, 'DeiTClsHead', False, **(head or {}))


def detector(norm_cfg=UN, backbone=None, **fpn):
    """A narrow RetinaNet on mmunorm's Swin: 12 norms."""
    backbone = backbone or swin_backbone(out_indices=(0, 1), pad_small_map=True, norm_cfg=norm_cfg)
    neck = {**dict(type='FPN', in_channels=[8, 16], out_channels=8, num_outs=3), **fpn}
    head = dict(type='RetinaHead', num_classes=3, in_channels=8, feat_channels=8, stacked_convs=1)
    return build(dict(type='RetinaNet', backbone=backbone, neck=neck, bbox_head=head), 'mmdet')


def mmdet_swin(norm_cfg=UN, **kwargs):
    """mmdet's own Swin, whose `norm_cfg` reaches every norm: 12 of them."""
    return {**dict(type='SwinTransformer', embed_dims=8, depths=(2, 2), num_heads=(2, 4), strides=(4, 2),
                   window_size=4, out_indices=(0, 1), norm_cfg=norm_cfg), **kwargs}


def mmdet_detector(**kwargs):
    return detector(backbone=mmdet_swin(**kwargs))


def timm_model(name, norm_cfg=UN, **kwargs):
    """A small model of timm with five classes and `norm_cfg`, if any, in place of its LayerNorms."""
    size = (dict(embed_dim=8, depths=(2, 2), num_heads=(2, 4), window_size=4) if 'swin' in name else
            dict(embed_dim=16, depth=2, num_heads=2, patch_size=8))
    model = timm.create_model(name, **{**dict(img_size=32, num_classes=5), **size, **kwargs})
    return model if norm_cfg is None else replace_norms(model, norm_cfg)


def timm_swin(**kwargs):
    return timm_model('swin_tiny_patch4_window7_224', **kwargs)


def tiny_vit():
    """timm's ViT with one block, for images of 16 x 16: 3 LayerNorms."""
    return timm.models.VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2,
                                         num_classes=3).eval()


def folded_tiny_vit():
    """The same with UN, folded."""
    model = randomize(replace_norms(tiny_vit(), UN), gamma='none')
    fuse_norms(model, strict=True, example=torch.randn(1, 3, 16, 16))
    return model


def one_stage_timm_swin(depth=2):
    """The same with one stage, for images of any size: 6 norms."""
    return timm_swin(strict_img_size=False, depths=(depth, ), num_heads=(2, ))


def timm_vit(**kwargs):
    return timm_model('vit_tiny_patch16_224', **kwargs)


class PreTrainedModel(nn.Module):
    """A model as transformers has them, for images of 16 x 16: 5 LayerNorms."""

    def __init__(self):
        super().__init__()
        self.vit = randomize(timm_vit(img_size=16, norm_cfg=None), gamma='none')
        self.config = SimpleNamespace(output_hidden_states=False)

    def forward(self, pixel_values, output_hidden_states=None):
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden_states = self.vit.forward_intermediates(pixel_values, intermediates_only=True, norm=False) if (
            wanted) else None
        return SimpleNamespace(logits=self.vit(pixel_values), hidden_states=hidden_states)

    def save_pretrained(self, folder):
        return folder


def outputs(model, x):
    """What a model computes for `x`, as a list of tensors; of a detector, the maps of its neck."""
    with torch.no_grad():
        out = model.extract_feat(x) if hasattr(model, 'with_bbox') else model(x)
    return list(out) if isinstance(out, (tuple, list)) else [out]


def norms(model):
    return [name for name, module in model.named_modules() if is_norm(module)]


def assert_equal(after, before, rtol=1e-9):
    """Of the largest value of each output, `rtol` is the largest error."""
    assert len(after) == len(before)
    for a, b in zip(after, before, strict=True):
        assert b.isfinite().all() and b.std() > 0
        torch.testing.assert_close(a, b, rtol=0, atol=rtol * b.abs().max().item())


def fold(model, *inputs, gamma='some', seed=0, rtol=1e-9, strict=False, example=None):
    """Draws a model's weights and folds it, in float64; what it computes of each input stays. Returns the report."""
    randomize(model.double(), seed, gamma)
    before = [outputs(model, x) for x in inputs]
    report = fuse_norms(model, strict, example)
    for x, expected in zip(inputs, before, strict=True):
        assert_equal(outputs(model, x), expected, rtol)
    return report


def assert_folds(model, *sizes, count=None, kept=(), gamma='some', seed=0):
    """Folds all norms but `kept`, `count` of them, and compares outputs for some image sizes. Returns the report."""
    generator, all_norms = torch.Generator().manual_seed(seed + 1), norms(model)
    images = [torch.randn(2, 3, *size, dtype=torch.float64, generator=generator) for size in sizes]
    report = fold(model, *images, gamma=gamma, seed=seed, strict=not kept)
    assert sorted(fold.norm for fold in report.kept) == sorted(kept) == sorted(norms(model))
    assert sorted(fold.norm for fold in report.folded + report.kept) == sorted(all_norms)
    assert count is None or len(report.folded) == count
    return report
