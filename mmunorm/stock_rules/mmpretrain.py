"""The fold rules of mmpretrain's Swin, T2T-ViT, ViT and classifiers, and of the blocks of mmcv in them."""
from __future__ import annotations

from mmcv.cnn import ConvModule
from mmcv.cnn.bricks.transformer import FFN, PatchEmbed, PatchMerging
from mmpretrain import models
from mmpretrain.models.backbones.swin_transformer import SwinBlock
from mmpretrain.models.backbones.t2t_vit import T2TTransformerLayer
from mmpretrain.models.backbones.vision_transformer import TransformerEncoderLayer
from mmpretrain.models.utils import MultiheadAttention, ShiftWindowMSA, WindowMSA

from ..fusion.padding import become
from ..fusion.rules import After, Averages, Chain, Emits, Into, Reads, Stays, fold_rule
from .windows import FilledShiftWindowMSA

HEAD = ('forward', 'pre_logits', 'loss', 'predict')
ENCODER = ('forward', '_format_output')

fold_rule(PatchEmbed)(lambda module: [After('norm', 'projection')])
fold_rule(PatchMerging)(lambda module: [Into('norm', 'reduction')])
fold_rule(FFN)(lambda module: [Reads('layers.0.0', adds_input=module.add_identity)])
fold_rule(SwinBlock)(lambda block: [Into('norm1', 'attn'), Into('norm2', 'ffn', identity=True)])
fold_rule(WindowMSA, MultiheadAttention)(lambda module: [Reads('qkv')])
fold_rule(ShiftWindowMSA, methods=('forward', 'get_attn_mask', 'window_partition', 'window_reverse'))(
    lambda module: [Reads('w_msa', pad=lambda attn, fill: become(attn, FilledShiftWindowMSA, fill))])
fold_rule(models.GlobalAveragePooling)(lambda neck: [Averages()])
fold_rule(models.LinearClsHead, models.MultiLabelLinearClsHead, methods=HEAD)(lambda head: [Reads('fc')])


@fold_rule(T2TTransformerLayer, TransformerEncoderLayer)
def transformer_layer(layer):
    yield Into('ln1', 'attn')
    yield Into('ln2', 'ffn', identity=True)


@fold_rule(ConvModule)
def conv_module(module):
    if module.order[0] == 'conv' and not module.with_explicit_padding:
        yield Reads('conv')


@fold_rule(models.SwinTransformer)
def emits_norms(backbone):
    for level, index in enumerate(sorted(backbone.out_indices), start=-len(backbone.out_indices)):
        yield Emits(f'norm{index}', level)


@fold_rule(models.T2T_ViT, methods=ENCODER)
def t2t_vit(backbone):
    # The final norm belongs to the last layer, whether or not that is an output.
    if backbone.final_norm and len(backbone.encoder) - 1 in backbone.out_indices:
        yield Emits('norm')


@fold_rule(models.VisionTransformer, models.DistilledVisionTransformer, methods=ENCODER)
def vision_transformer(backbone):
    if len(backbone.layers) - 1 not in backbone.out_indices:
        return
    if backbone.out_type == 'avg_featmap':
        yield Stays('ln1', 'its output is averaged and normalized again')
        yield Emits('ln2')
    else:
        yield Emits('ln1')


@fold_rule(models.VisionTransformerClsHead, methods=HEAD)
def vision_transformer_head(head):
    yield Reads('layers.pre_logits' if head.hidden_dim else 'layers.head')


@fold_rule(models.DeiTClsHead, methods=HEAD)
def deit_head(head):
    yield Reads('layers.pre_logits') if head.hidden_dim else Reads('layers.head', 'layers.head_dist')


@fold_rule(models.ImageClassifier, methods=('forward', 'extract_feat', 'loss', 'predict'))
def image_classifier(model):
    yield Chain(*(name for name in ('backbone', 'neck', 'head') if getattr(model, name, None) is not None))
