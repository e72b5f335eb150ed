"""The fold rules of mmdet's Swin, FPN and detectors; mmdet itself is imported only with a model of it."""
from ..fusion.padding import become
from ..fusion.rules import After, Chain, Into, Reads, fold_rule
from .mmpretrain import emits_norms

SWIN = 'mmdet.models.backbones.swin'


def _pad(attn, fill):
    from .mmdet_windows import FilledShiftWindowMSA
    become(attn, FilledShiftWindowMSA, fill)


fold_rule('mmdet.models.layers.transformer.utils.PatchEmbed')(lambda module: [After('norm', 'projection')])
fold_rule('mmdet.models.layers.transformer.utils.PatchMerging')(lambda module: [Into('norm', 'reduction')])
fold_rule(f'{SWIN}.SwinBlock')(lambda block: [Into('norm1', 'attn'), Into('norm2', 'ffn', identity=True)])
fold_rule(f'{SWIN}.WindowMSA')(lambda module: [Reads('qkv')])
fold_rule(f'{SWIN}.ShiftWindowMSA', methods=('forward', 'window_partition', 'window_reverse'))(
    lambda module: [Reads('w_msa', pad=_pad)])
fold_rule(f'{SWIN}.SwinTransformer')(emits_norms)


@fold_rule('mmdet.models.necks.fpn.FPN')
def fpn(neck):
    for i in range(len(neck.lateral_convs)):
        level = neck.start_level + i
        readers = [f'lateral_convs.{i}']
        is_last = level == neck.backbone_end_level - 1
        if is_last and neck.add_extra_convs == 'on_input' and len(neck.fpn_convs) > len(neck.lateral_convs):
            readers.append(f'fpn_convs.{len(neck.lateral_convs)}')
        yield Reads(*readers, level=level - neck.num_ins)


@fold_rule('mmdet.models.detectors.single_stage.SingleStageDetector',
           'mmdet.models.detectors.two_stage.TwoStageDetector',
           'mmdet.models.detectors.base_detr.DetectionTransformer', methods=('forward', 'extract_feat'))
def detector(model):
    if model.with_neck:
        yield Chain('backbone', 'neck')
