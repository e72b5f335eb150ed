"""The fold rules of timm's Swin, ViT and DeiT, for models whose norms `mmunorm.replace_norms` replaced."""
from __future__ import annotations

from ..norms.layers import is_norm
from .padding import become
from .registry import Behind, Into, Reads, Stays, fold_rule

MAX_POOL = 'its output goes through a maximum'
CLASSIFIER = ('forward', 'forward_features', 'forward_head')


@fold_rule('timm.layers.patch_embed.PatchEmbed')
def patch_embed(module):
    yield Behind('norm', 'proj')


@fold_rule('timm.models.swin_transformer.PatchMerging')
def patch_merging(module):
    yield Into('norm', 'reduction')


def _pad_swin(block, fill):
    from .windows_timm import FilledSwinTransformerBlock
    become(block, FilledSwinTransformerBlock, fill)


@fold_rule('timm.models.swin_transformer.SwinTransformerBlock', methods=('forward', '_attn', 'get_attn_mask'))
def swin_block(block):
    yield Into('norm1', 'attn', pad=_pad_swin)
    yield Into('norm2', 'mlp')


@fold_rule('timm.models.vision_transformer.Block')
def vit_block(block):
    yield Into('norm1', 'attn')
    yield Into('norm2', 'mlp')


@fold_rule('timm.models.swin_transformer.WindowAttention')
def window_attention(module):
    yield Reads('qkv')


@fold_rule('timm.layers.attention.Attention')
def attention(module):
    if module.gate is None:
        yield Reads('qkv')
        yield Into('norm', 'proj')
    else:
        yield Reads('qkv', 'gate')
        yield Stays('norm', 'its output is multiplied by a gate')


@fold_rule('timm.layers.mlp.Mlp')
def mlp(module):
    yield Reads('fc1')
    yield Into('norm', 'fc2')


@fold_rule('timm.models.swin_transformer.SwinTransformer', methods=CLASSIFIER)
def swin(model):
    pool = getattr(model.head, 'global_pool', None)
    if 'max' in getattr(pool, 'pool_type', ''):
        yield Stays('norm', MAX_POOL)
    else:
        yield Into('norm', 'head')


@fold_rule('timm.layers.classifier.ClassifierHead')
def classifier_head(head):
    if 'max' not in head.global_pool.pool_type:
        yield Reads('fc')


@fold_rule('timm.models.vision_transformer.VisionTransformer', methods=(*CLASSIFIER, 'pool'))
def vit(model):
    last = 'fc_norm' if is_norm(model.fc_norm) else 'norm'
    if model.attn_pool is not None and last == 'norm':
        yield Stays('norm', 'it is read by attention pooling')
    elif 'max' in model.global_pool and last == 'norm':
        yield Stays('norm', MAX_POOL)
    else:
        yield Into(last, 'head')


@fold_rule('timm.models.deit.VisionTransformerDistilled', methods=CLASSIFIER)
def distilled_vit(model):
    yield Into('norm', 'head', 'head_dist')
