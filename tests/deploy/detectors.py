"""Small detectors whose boxes, scores and masks differ from place to place though nobody has trained them."""
import torch
from mmdet.registry import MODELS as MMDET
from mmdet.structures import DetDataSample
from mmengine.config import ConfigDict
from mmengine.registry import DefaultScope
from torch import nn

from ..fusion import models
from .conftest import swin_backbone

# Scores must differ: those that are equal have no order.
GAINS = dict(neck=0.4, rpn_cls=0.7, rpn_reg=0.3, fc_reg=0.5, retina_reg=0.3)
NMS = dict(type='nms', iou_threshold=0.6)
CODER = dict(type='DeltaXYWHBBoxCoder', target_stds=[0.3] * 4)
PVT = dict(type='PyramidVisionTransformer', embed_dims=8, num_stages=2, num_layers=[1, 1], num_heads=[1, 2],
           patch_sizes=[4, 2], strides=[4, 2], paddings=[0, 0], sr_ratios=[2, 1], mlp_ratios=[2, 2],
           out_indices=(0, 1), norm_cfg=models.UN, pretrain_img_size=32)


def build(rest, backbone):
    """A detector with a backbone of two maps, an FPN with three levels, and weights that give confident scores."""
    cfg = dict(
        data_preprocessor=dict(type='DetDataPreprocessor', mean=[123., 116., 103.], std=[58., 57., 57.],
                               bgr_to_rgb=True, pad_size_divisor=4),
        backbone=backbone or swin_backbone(out_indices=(0, 1), pad_small_map=True),
        neck=dict(type='FPN', in_channels=[8, 16], out_channels=8, num_outs=3), train_cfg=None, **rest)
    with DefaultScope.overwrite_default_scope('mmdet'), torch.random.fork_rng():
        torch.manual_seed(0)
        model = MMDET.build(ConfigDict(cfg))
    generator = torch.Generator().manual_seed(1)  # with 0, a Faster R-CNN finds one class alone
    for name, parameter in model.named_parameters():
        if name.startswith(('neck', 'rpn_head', 'roi_head', 'bbox_head')) and parameter.ndim > 1:
            fan = parameter[0].numel()
            gain = next((gain for part, gain in GAINS.items() if part in name), 1.5)
            parameter.data = torch.randn(parameter.shape, generator=generator) * gain / fan**0.5
    return models.randomize(model, gamma='none')


def retinanet(backbone=None, head=None, **test_cfg):
    """A RetinaNet."""
    anchors = dict(type='AnchorGenerator', octave_base_scale=4, scales_per_octave=2, ratios=[0.5, 1., 2.],
                   strides=[4, 8, 16])
    head = dict(type='RetinaHead', num_classes=3, in_channels=8, feat_channels=8, stacked_convs=1,
                anchor_generator=anchors, bbox_coder=CODER, **(head or {}))
    cfg = {**dict(nms_pre=100, min_bbox_size=0, score_thr=0.05, nms=NMS, max_per_img=20), **test_cfg}
    model = build(dict(type='RetinaNet', bbox_head=head, test_cfg=cfg), backbone)
    weight = model.bbox_head.retina_cls.weight.data
    weight -= weight.mean((1, 2, 3), keepdim=True)  # else one class has the largest scores everywhere
    return model


def rcnn(mask=True, backbone=None, rpn=None, rcnn_cfg=None, num_classes=3, cascade=None):
    """A Faster or Mask R-CNN; with arguments for the box heads in `cascade`, a Cascade R-CNN of three stages."""
    roi_layer = dict(type='RoIAlign', output_size=7, sampling_ratio=0)
    extractor = dict(type='SingleRoIExtractor', roi_layer=roi_layer, out_channels=8, featmap_strides=[4, 8],
                     finest_scale=14)
    head = dict(type='Shared2FCBBoxHead', in_channels=8, fc_out_channels=16, roi_feat_size=7, num_classes=num_classes,
                bbox_coder=CODER, **(cascade or {}))
    heads = dict(type='StandardRoIHead', bbox_roi_extractor=extractor, bbox_head=head)
    if cascade is not None:
        coders = ({**CODER, 'target_stds': [std] * 4} for std in (0.3, 0.2, 0.1))
        heads.update(type='CascadeRoIHead', num_stages=3, stage_loss_weights=[1, 1, 1],
                     bbox_head=[{**head, 'bbox_coder': coder} for coder in coders])
    if mask:
        heads.update(
            mask_roi_extractor={**extractor, 'roi_layer': {**roi_layer, 'output_size': 4, 'sampling_ratio': 2}},
            mask_head=dict(type='FCNMaskHead', num_convs=1, in_channels=8, conv_out_channels=8,
                           num_classes=num_classes))
    rest = dict(
        type='CascadeRCNN' if cascade is not None else 'MaskRCNN' if mask else 'FasterRCNN',
        rpn_head=dict(
            type='RPNHead', in_channels=8, feat_channels=8, bbox_coder={**CODER, 'target_stds': [1.] * 4},
            anchor_generator=dict(type='AnchorGenerator', scales=[4], ratios=[0.5, 1., 2.], strides=[4, 8, 16])),
        roi_head=heads,
        test_cfg=dict(
            rpn={**dict(nms_pre=100, max_per_img=60, nms=NMS, min_bbox_size=0), **(rpn or {})},
            rcnn={**dict(score_thr=0.05, nms=NMS, max_per_img=20, mask_thr_binary=0.5), **(rcnn_cfg or {})}))
    return build(rest, backbone)


def without_neck():
    """A RetinaNet whose backbone includes the FPN."""
    model = retinanet(**MOST)
    model.backbone = nn.Sequential(model.backbone, model.neck).eval()
    del model.neck
    return model


# One of each kind that a file can have whole, with detections of several classes.
MOST = dict(max_per_img=60)
KINDS = dict(
    retinanet=lambda: retinanet(**MOST), retinanet_pvt=lambda: retinanet(PVT, **MOST),
    retinanet_without_neck=without_neck,
    faster_rcnn=lambda: rcnn(False, rcnn_cfg=MOST), mask_rcnn=lambda: rcnn(rcnn_cfg=MOST),
    cascade_rcnn=lambda: rcnn(False, rcnn_cfg=MOST, cascade=dict(reg_class_agnostic=False)),
    cascade_mask_rcnn=lambda: rcnn(rcnn_cfg=MOST, cascade=dict(reg_class_agnostic=True)))


def batch(sizes):
    """Images of noise as a data loader of mmdet gives them."""
    generator = torch.Generator().manual_seed(1)
    return dict(
        inputs=[torch.randint(0, 256, (3, *size), generator=generator, dtype=torch.uint8) for size in sizes],
        data_samples=[DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1., 1.)))
                      for size in sizes])


def assert_same_detections(ours, expected):
    """Predictions of two models for the same batch, whose detections have several classes."""
    for sample, other in zip(ours, expected, strict=True):
        a, b = sample.pred_instances, other.pred_instances
        assert len(a) == len(b) > 10 and len(b.labels.unique()) > 1
        assert a.labels.tolist() == b.labels.tolist()
        torch.testing.assert_close(a.scores, b.scores, rtol=0, atol=1e-4)
        torch.testing.assert_close(a.bboxes, b.bboxes, rtol=0, atol=1e-2)
        if 'masks' in b:
            assert (a.masks != b.masks).float().mean() < 1e-3 < b.masks.float().mean()
