"""The fold rules of the OpenMMLab blocks and of ours: where each of their norms goes."""
from __future__ import annotations

from mmcv.cnn import ConvModule
from mmcv.cnn.bricks.transformer import FFN, PatchEmbed, PatchMerging
from mmpretrain.models import (
    DeiTClsHead,
    DistilledVisionTransformer,
    GlobalAveragePooling,
    ImageClassifier,
    LinearClsHead,
    MultiLabelLinearClsHead,
    SwinTransformer,
    T2T_ViT,
    VisionTransformer,
    VisionTransformerClsHead,
)
from mmpretrain.models.backbones.swin_transformer import SwinBlock
from mmpretrain.models.backbones.t2t_vit import T2TTransformerLayer
from mmpretrain.models.backbones.vision_transformer import TransformerEncoderLayer
from mmpretrain.models.utils import MultiheadAttention, ShiftWindowMSA, WindowMSA

from ..backbones.performer import PerformerAttention, PerformerLayer
from ..backbones.swin import ResidualSwinBlock
from ..backbones.t2t_vit import ResidualT2TLayer
from ..backbones.vit import ResidualEncoderLayer
from ..residual.sublayer import Entrance, describe
from .padding import become
from .registry import Averages, Behind, Chain, Emits, Into, Reads, Stays, fold_rule

HEAD = ('forward', 'pre_logits', 'loss', 'predict')
MMDET_WINDOWS = ('forward', 'window_partition', 'window_reverse')
WINDOWS = ('get_attn_mask', *MMDET_WINDOWS)


@fold_rule(PatchEmbed, 'mmdet.models.layers.transformer.utils.PatchEmbed')
def patch_embed(module):
    yield Behind('norm', 'projection')


@fold_rule(PatchMerging, 'mmdet.models.layers.transformer.utils.PatchMerging')
def patch_merging(module):
    yield Into('norm', 'reduction')


@fold_rule(SwinBlock, 'mmdet.models.backbones.swin.SwinBlock')
def swin_block(block):
    yield Into('norm1', 'attn')
    yield Into('norm2', 'ffn', identity=True)


@fold_rule(T2TTransformerLayer, TransformerEncoderLayer, PerformerLayer)
def transformer_layer(layer):
    yield Into('ln1', 'attn')
    yield Into('ln2', 'ffn', identity=True)


@fold_rule(ResidualSwinBlock, ResidualT2TLayer, ResidualEncoderLayer)
def residual_layer(layer):
    names = {id(module): name for name, module in layer.named_modules()}
    for residual, part, norm in zip(('residual1', 'residual2'), ('attn', 'ffn'), layer.norm_names, strict=True):
        norm_at = getattr(layer, residual).norm_at
        own = f'{residual}.norm'
        sublayer = describe(getattr(layer, part))
        source = names[id(sublayer.last)] if sublayer.is_plain_behind_last else ''
        if norm_at == 'pre':
            yield Into(norm, part)
        if norm_at == 'post':
            yield Stays(norm, 'its output is the stream itself')
        for behind in (norm, own) if norm_at == 'mid' else (own, ):
            yield Behind(behind, source) if source else Stays(behind, 'its input is scaled in between')


@fold_rule(Entrance)
def entrance(module):
    yield Into('norm', 'linear')


@fold_rule(WindowMSA, 'mmdet.models.backbones.swin.WindowMSA', MultiheadAttention)
def attention(module):
    yield Reads('qkv')


@fold_rule(PerformerAttention)
def performer_attention(module):
    yield Reads('kqv')


def _pad_mmpretrain(attn, fill):
    from .windows_mmpretrain import FilledShiftWindowMSA
    become(attn, FilledShiftWindowMSA, fill)


@fold_rule(ShiftWindowMSA, methods=WINDOWS)
def mmpretrain_windows(module):
    yield Reads('w_msa', pad=_pad_mmpretrain)


def _pad_mmdet(attn, fill):
    from .windows_mmdet import FilledShiftWindowMSA
    become(attn, FilledShiftWindowMSA, fill)


@fold_rule('mmdet.models.backbones.swin.ShiftWindowMSA', methods=MMDET_WINDOWS)
def mmdet_windows(module):
    yield Reads('w_msa', pad=_pad_mmdet)


@fold_rule(FFN)
def ffn(module):
    yield Reads('layers.0.0', adds_input=module.add_identity)


@fold_rule(ConvModule)
def conv_module(module):
    if module.order[0] == 'conv' and not module.with_explicit_padding:
        yield Reads('conv')


@fold_rule(SwinTransformer, 'mmdet.models.backbones.swin.SwinTransformer')
def swin(backbone):
    for level, index in enumerate(sorted(backbone.out_indices), start=-len(backbone.out_indices)):
        yield Emits(f'norm{index}', level)


@fold_rule(T2T_ViT, methods=('forward', '_format_output'))
def t2t_vit(backbone):
    # The final norm belongs to the last layer, whether or not that is an output.
    if backbone.final_norm and len(backbone.encoder) - 1 in backbone.out_indices:
        yield Emits('norm')


@fold_rule(VisionTransformer, DistilledVisionTransformer, methods=('forward', '_format_output'))
def vision_transformer(backbone):
    if len(backbone.layers) - 1 not in backbone.out_indices:
        return
    if backbone.out_type == 'avg_featmap':
        yield Stays('ln1', 'its output is averaged and normalized again')
        yield Emits('ln2')
    else:
        yield Emits('ln1')


@fold_rule(GlobalAveragePooling)
def global_average_pooling(neck):
    yield Averages()


@fold_rule(LinearClsHead, MultiLabelLinearClsHead, methods=HEAD)
def linear_head(head):
    yield Reads('fc')


@fold_rule(VisionTransformerClsHead, methods=HEAD)
def vision_transformer_head(head):
    yield Reads('layers.pre_logits' if head.hidden_dim else 'layers.head')


@fold_rule(DeiTClsHead, methods=HEAD)
def deit_head(head):
    yield Reads('layers.pre_logits') if head.hidden_dim else Reads('layers.head', 'layers.head_dist')


@fold_rule('mmdet.models.necks.fpn.FPN')
def fpn(neck):
    for i in range(len(neck.lateral_convs)):
        level = neck.start_level + i
        readers = [f'lateral_convs.{i}']
        is_last = level == neck.backbone_end_level - 1
        if is_last and neck.add_extra_convs == 'on_input' and len(neck.fpn_convs) > len(neck.lateral_convs):
            readers.append(f'fpn_convs.{len(neck.lateral_convs)}')
        yield Reads(*readers, level=level - neck.num_ins)


@fold_rule(ImageClassifier, methods=('forward', 'extract_feat', 'loss', 'predict'))
def image_classifier(model):
    parts = [name for name in ('backbone', 'neck', 'head') if getattr(model, name, None) is not None]
    yield Chain(*parts)


@fold_rule('mmdet.models.detectors.single_stage.SingleStageDetector',
           'mmdet.models.detectors.two_stage.TwoStageDetector',
           'mmdet.models.detectors.base_detr.DetectionTransformer', methods=('forward', 'extract_feat'))
def detector(model):
    if model.with_neck:
        yield Chain('backbone', 'neck')
