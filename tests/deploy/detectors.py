"""A small Mask R-CNN whose boxes, scores and masks differ from place to place though nobody has trained it."""
import torch
from mmdet.registry import MODELS as MMDET
from mmengine.config import ConfigDict
from mmengine.registry import DefaultScope

from ..fusion import models

# Scores must differ: those that are equal have no order.
GAINS = dict(neck=0.4, rpn_cls=0.7, rpn_reg=0.3, fc_reg=0.5)


def rcnn(mask=True, backbone=None, rpn=None, rcnn_cfg=None, num_classes=3):
    """Two stages of a Swin, three levels of an FPN, weights large enough for confident scores."""
    arch = dict(embed_dims=8, depths=[1, 2], num_heads=[2, 4])
    backbone = backbone or models.swin_backbone(arch=arch, out_indices=(0, 1), pad_small_map=True)
    roi_layer = dict(type='RoIAlign', output_size=7, sampling_ratio=0)
    extractor = dict(type='SingleRoIExtractor', roi_layer=roi_layer, out_channels=8, featmap_strides=[4, 8],
                     finest_scale=14)
    coder = dict(type='DeltaXYWHBBoxCoder', target_stds=[0.3] * 4)
    heads = dict(
        type='StandardRoIHead', bbox_roi_extractor=extractor,
        bbox_head=dict(type='Shared2FCBBoxHead', in_channels=8, fc_out_channels=16, roi_feat_size=7,
                       num_classes=num_classes, bbox_coder=coder))
    if mask:
        heads.update(
            mask_roi_extractor={**extractor, 'roi_layer': {**roi_layer, 'output_size': 4, 'sampling_ratio': 2}},
            mask_head=dict(type='FCNMaskHead', num_convs=1, in_channels=8, conv_out_channels=8,
                           num_classes=num_classes))
    nms = dict(type='nms', iou_threshold=0.6)
    cfg = dict(
        type='MaskRCNN' if mask else 'FasterRCNN',
        data_preprocessor=dict(type='DetDataPreprocessor', mean=[123., 116., 103.], std=[58., 57., 57.],
                               bgr_to_rgb=True, pad_size_divisor=32),
        backbone=backbone,
        neck=dict(type='FPN', in_channels=[8, 16], out_channels=8, num_outs=3),
        rpn_head=dict(
            type='RPNHead', in_channels=8, feat_channels=8, bbox_coder={**coder, 'target_stds': [1.] * 4},
            anchor_generator=dict(type='AnchorGenerator', scales=[4], ratios=[0.5, 1., 2.], strides=[4, 8, 16])),
        roi_head=heads,
        train_cfg=None,
        test_cfg=dict(
            rpn={**dict(nms_pre=100, max_per_img=60, nms=nms, min_bbox_size=0), **(rpn or {})},
            rcnn={**dict(score_thr=0.05, nms=nms, max_per_img=20, mask_thr_binary=0.5), **(rcnn_cfg or {})}))
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MMDET.build(ConfigDict(cfg))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.startswith(('neck', 'rpn_head', 'roi_head')) and parameter.ndim > 1:
            fan = parameter[0].numel()
            gain = next((gain for part, gain in GAINS.items() if part in name), 1.5)
            parameter.data = torch.randn(parameter.shape, generator=generator) * gain / fan**0.5
    return models.randomize(model, gamma='none')
