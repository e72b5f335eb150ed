"""The fold rules of timm's Swin, ViT and DeiT, for models whose norms `mmunorm.replace_norms` replaced.

timm itself is imported only with a model of it.
"""
from __future__ import annotations

from ..fusion.padding import become
from ..fusion.rules import After, Into, Reads, Stays, fold_rule
from ..norms.layers import is_norm

SWIN, VIT = 'timm.models.swin_transformer', 'timm.models.vision_transformer'
MAX_POOL = 'its output goes through a maximum'
CLASSIFIER = ('forward', 'forward_features', 'forward_head')


def _pad(block, fill):
    from .timm_block import FilledSwinTransformerBlock
    become(block, FilledSwinTransformerBlock, fill)


fold_rule('timm.layers.patch_embed.PatchEmbed')(lambda module: [After('norm', 'proj')])
fold_rule('timm.layers.mlp.Mlp')(lambda module: [Reads('fc1'), Into('norm', 'fc2')])
fold_rule(f'{SWIN}.PatchMerging')(lambda module: [Into('norm', 'reduction')])
fold_rule(f'{SWIN}.WindowAttention')(lambda module: [Reads('qkv')])
fold_rule(f'{SWIN}.SwinTransformerBlock', methods=('forward', '_attn', 'get_attn_mask'))(
    lambda block: [Into('norm1', 'attn', pad=_pad), Into('norm2', 'mlp')])
fold_rule(f'{VIT}.Block')(lambda block: [Into('norm1', 'attn'), Into('norm2', 'mlp')])
fold_rule('timm.models.deit.VisionTransformerDistilled', methods=CLASSIFIER)(
    lambda model: [Into('norm', 'head', 'head_dist')])


@fold_rule('timm.layers.attention.Attention')
def attention(module):
    yield Reads('qkv') if module.gate is None else Reads('qkv', 'gate')
    yield Into('norm', 'proj') if module.gate is None else Stays('norm', 'its output is multiplied by a gate')


@fold_rule(f'{SWIN}.SwinTransformer', methods=CLASSIFIER)
def swin(model):
    pool = getattr(model.head, 'global_pool', None)
    yield Stays('norm', MAX_POOL) if 'max' in getattr(pool, 'pool_type', '') else Into('norm', 'head')


@fold_rule('timm.layers.classifier.ClassifierHead')
def classifier_head(head):
    if 'max' not in head.global_pool.pool_type:
        yield Reads('fc')


@fold_rule(f'{VIT}.VisionTransformer', methods=(*CLASSIFIER, 'pool'))
def vit(model):
    last = 'fc_norm' if is_norm(model.fc_norm) else 'norm'
    if model.attn_pool is not None and last == 'norm':
        yield Stays('norm', 'it is read by attention pooling')
    elif 'max' in model.global_pool and last == 'norm':
        yield Stays('norm', MAX_POOL)
    else:
        yield Into(last, 'head')
