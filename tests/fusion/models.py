"""Small models with offline norms whose statistics are far from trivial."""
import torch
from mmengine.registry import MODELS, DefaultScope

from mmunorm.fusion import is_norm

SWIN_ARCH = dict(embed_dims=8, depths=[2, 2], num_heads=[2, 4])


def build(cfg, scope='mmpretrain'):
    with DefaultScope.overwrite_default_scope(scope):
        return MODELS.build(cfg)


def randomize(model, seed=0, zeros=True):
    """Draws all statistics, scales (negative ones, and zeros) and shifts, and the biases of linear layers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor, function=torch.randn):
        return function(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)

    with torch.no_grad():
        for module in model.modules():
            if is_norm(module):
                module.weight.copy_(draw(module.weight))
                if zeros:
                    module.weight[::3] = 0
                module.bias.copy_(draw(module.bias))
                for name, low in (('running_var', 0.2), ('running_mean', -0.5)):
                    if getattr(module, name, None) is not None:
                        getattr(module, name).copy_(draw(module.running_var, torch.rand) + low)
            elif getattr(module, 'bias', None) is not None:
                module.bias.copy_(draw(module.bias) * 0.1)
    model.eval()
    return model


def classifier(backbone, in_channels, head='LinearClsHead', neck=True):
    return build(dict(
        type='ImageClassifier', backbone=backbone, neck=dict(type='GlobalAveragePooling') if neck else None,
        head=dict(type=head, num_classes=5, in_channels=in_channels)))


def swin_classifier(norm='UN', **kwargs):
    """mmunorm's Swin: 10 norms, window 4."""
    settings = dict(arch=SWIN_ARCH, window_size=4, img_size=32, out_indices=(1, ), norm_cfg=dict(type=norm))
    return classifier(dict(type='UNSwinTransformer', **{**settings, **kwargs}), 16)


def t2t_classifier(norm='UN', **kwargs):
    """T2T-ViT with Performer tokens and two layers: 9 norms."""
    settings = dict(
        img_size=32, embed_dims=16, num_layers=2, norm_cfg=dict(type=norm), t2t_cfg=dict(token_dims=8),
        layer_cfgs=dict(num_heads=2, feedforward_channels=24))
    backbone = dict(type='UNT2TViT', **{**settings, **kwargs})
    return classifier(backbone, 16, 'VisionTransformerClsHead', neck=False)


def vit_classifier(norm='UN', **kwargs):
    """mmpretrain's Vision Transformer with two layers: 5 norms."""
    arch = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=24)
    backbone = dict(type='VisionTransformer', arch=arch, img_size=32, patch_size=8,
                    norm_cfg=dict(type=norm), **kwargs)
    return classifier(backbone, 16, 'VisionTransformerClsHead', neck=False)


def detector(norm='UN', backbone=None, **neck):
    """A narrow Faster R-CNN on mmunorm's Swin: 12 norms."""
    backbone = backbone or dict(
        type='UNSwinTransformer', arch=SWIN_ARCH, window_size=4, out_indices=(0, 1), pad_small_map=True,
        norm_cfg=dict(type=norm))
    neck = {**dict(type='FPN', in_channels=[8, 16], out_channels=8, num_outs=3), **neck}
    return build(dict(
        type='RetinaNet', backbone=backbone, neck=neck,
        bbox_head=dict(type='RetinaHead', num_classes=3, in_channels=8, feat_channels=8, stacked_convs=1)),
        'mmdet')
