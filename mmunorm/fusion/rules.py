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
from ..backbones.swin import ResidualSwinBlock, UNSwinTransformer
from ..backbones.t2t_vit import ResidualT2TLayer, UNT2TViT
from ..backbones.vit import ResidualEncoderLayer, UNVisionTransformer
from ..enhancement.iat import GlobalBranch, LocalBlock, QueryAttention
from ..residuals.sublayer import Entrance, describe
from ..translation.transformer import (
    CrossAttention,
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    SelfAttention,
    UNTransformer,
)
from .padding import become
from .registry import Averages, Behind, Chain, Emits, Into, Reads, Station, Stays, Stream, Unties, fold_rule
from .streams import pad_patch_merging

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


@fold_rule(ResidualSwinBlock, ResidualT2TLayer, ResidualEncoderLayer, EncoderLayer, DecoderLayer)
def residual_layer(layer):
    for residual, part, norm in layer.sublayers():
        norm_at = getattr(layer, residual).norm_at
        own = f'{residual}.norm'
        sublayer = describe(getattr(layer, part))
        source = _path(layer, sublayer.last) if sublayer.is_plain_behind_last else ''
        if norm_at == 'pre':
            yield Into(norm, part)
        for behind in (norm, own) if norm_at == 'mid' else (own, ):
            yield Behind(behind, source) if source else Stays(behind, 'its input is scaled in between')
        yield Stays(f'{residual}.mix_norm', 'its output is mixed into the streams of all later layers')  # DLCL's


def _path(layer, part):
    """The name of a part within a layer."""
    return next(name for name, module in layer.named_modules() if module is part)


def _stations(names, layers):
    """The stations of layers `layers` with full names `names`; none where their norms stand elsewhere."""
    parts = []
    for name, layer in zip(names, layers, strict=True):
        for residual, part, norm in layer.sublayers():
            sublayer = describe(getattr(layer, part))
            if getattr(layer, residual).norm_at != 'post' or not sublayer.is_plain_behind_last:
                return ()
            parts.append([f'{name}.{path}' for path in (residual, _path(layer, sublayer.last), norm, part)])
    readers = [*((part[3], ) for part in parts[1:]), ()][:len(parts)]  # a stage may have no block
    return tuple(Station(*part[:3], reader) for part, reader in zip(parts, readers, strict=True))


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


@fold_rule(UNSwinTransformer)
def un_swin(backbone):
    yield from swin(backbone)
    for i, stage in enumerate(backbone.stages):
        stations = _stations([f'stages.{i}.blocks.{j}' for j in range(len(stage.blocks))], stage.blocks)
        padding = getattr(stage.downsample, 'adaptive_padding', None)
        if not stations or padding is not None and padding.padding != 'corner':
            continue
        ends, pads = [], []
        if stage.downsample is not None:
            ends.append(f'stages.{i}.downsample.norm')
            pads.append((f'stages.{i}.downsample', pad_patch_merging))
        if i in backbone.out_indices and not (backbone.out_after_downsample and stage.downsample is not None):
            ends.append(f'norm{i}')
        yield Stream(stations, tuple(ends), tuple(pads))


def _encoder(backbone, name, final):
    """Facts about an encoder whose final norm, if it has one, is `final`."""
    layers = getattr(backbone, name)
    last = len(layers) - 1
    if last not in backbone.out_indices:
        return
    stations = _stations([f'{name}.{i}' for i in range(len(layers))], layers)
    if stations and list(backbone.out_indices) != [last]:
        for station in stations:
            yield Stays(station.norm, 'the stream it stands in is an output in its middle, too')
    elif stations and not final:
        yield Stream(stations)
        yield Emits(stations[-1].norm)
    elif stations:
        yield Stream(stations, (final, ))
    if final:
        yield Emits(final)


@fold_rule(T2T_ViT, methods=('forward', '_format_output'))
def t2t_vit(backbone):
    # The final norm belongs to the last layer, whether or not that is an output.
    if backbone.final_norm and len(backbone.encoder) - 1 in backbone.out_indices:
        yield Emits('norm')


@fold_rule(UNT2TViT, methods=('forward', '_format_output'))
def un_t2t_vit(backbone):
    yield from _encoder(backbone, 'encoder', 'norm' if backbone.final_norm else '')


@fold_rule(VisionTransformer, DistilledVisionTransformer, methods=('forward', '_format_output'))
def vision_transformer(backbone):
    if len(backbone.layers) - 1 not in backbone.out_indices:
        return
    if backbone.out_type == 'avg_featmap':
        yield Stays('ln1', 'its output is averaged and normalized again')
        yield Emits('ln2')
    else:
        yield Emits('ln1')


@fold_rule(UNVisionTransformer, methods=('forward', '_format_output'))
def un_vision_transformer(backbone):
    if backbone.out_type == 'avg_featmap' and backbone.final_norm:
        yield from vision_transformer(backbone)
    else:
        is_averaged = backbone.out_type == 'avg_featmap'
        yield from _encoder(backbone, 'layers', 'ln2' if is_averaged else 'ln1' if backbone.final_norm else '')


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


@fold_rule(LocalBlock)
def local_block(block):
    yield Into('norm1', 'conv1')
    yield Behind('scale1', 'conv2')
    yield Into('norm2', 'fc1')
    yield Behind('scale2', 'fc2')


@fold_rule(GlobalBranch)
def global_branch(branch):
    yield Behind('bn1', 'conv1')
    yield Behind('bn2', 'conv2')
    yield Into('norm1', 'attn')
    yield Into('norm2', 'fc1')


@fold_rule(QueryAttention)
def query_attention(module):
    yield Reads('k', 'v')


@fold_rule(SelfAttention)
def self_attention(module):
    yield Reads('qkv')


@fold_rule(CrossAttention)
def cross_attention(module):
    yield Reads('q')


@fold_rule(FeedForward)
def feed_forward(module):
    yield Reads('fc1')


@fold_rule(UNTransformer, methods=('forward', 'encode', 'decode'))
def un_transformer(model):
    memory = [f'decoder.{i}.cross_attn.kv' for i in range(len(model.decoder))]
    for stack, readers in (('encoder', memory), ('decoder', ['output'])):
        layers = getattr(model, stack)
        final = f'{stack}_norm'
        stations = _stations([f'{stack}.{i}' for i in range(len(layers))], layers)
        if stations:
            yield Stream(stations)
            final = stations[-1].norm
        yield Into(final, *readers)
    yield Unties('output')
