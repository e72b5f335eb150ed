"""A detector of mmdet as one graph: its networks and settings for :mod:`.postprocess`, and which ones have these."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from mmcv.ops import RoIAlign
from mmdet.models.dense_heads import FreeAnchorRetinaHead, PISARetinaHead, RetinaHead, RPNHead
from mmdet.models.detectors import CascadeRCNN, FasterRCNN, MaskRCNN, RetinaNet
from mmdet.models.roi_heads import CascadeRoIHead, FCNMaskHead, SingleRoIExtractor, StandardRoIHead
from mmdet.models.task_modules.coders.delta_xywh_bbox_coder import DeltaXYWHBBoxCoder
from torch import Tensor, nn

from ...graph import Pixels
from ...rewrite.pixels import fold_pixels
from ..base import ChannelsLast
from .postprocess import detect

# The batch sizes of RoI heads in a file; the last batch is filled, so masks, of few detections, have a smaller one.
REGIONS, MASKS = 100, 20


class DetectorGraph(nn.Module):
    """A complete detector of mmdet in eval mode.

    Takes `images` `(N, 3, H, W)` float32, 0 to 255, with any padding on the right and at the bottom, and `sizes`
    `(N, 2)` float32, height and width without padding. Returns the outputs of :func:`.postprocess.detect`.
    """
    inputs = ('images', 'sizes')

    def __init__(self, detector: nn.Module):
        super().__init__()
        self.pixels = Pixels(detector.data_preprocessor)
        self.detector = detector
        self.settings = settings_of(detector, self.pixels)
        self.features = Features(detector, self.pixels)
        self.meta, self.outputs = dict(detector=self.settings), ('dets', 'labels')
        # On pooled regions: `refine0`, ... for the earlier stages of a cascade, `heads`, and `masks`.
        self.networks, roi = nn.ModuleDict(), getattr(detector, 'roi_head', None)
        if roi is not None:
            *earlier, last = map(Heads, stages(roi.bbox_head))
            self.networks.update({f'refine{index}': heads for index, heads in enumerate(earlier)} | dict(heads=last))
            if roi.with_mask:
                self.networks['masks'] = Masks(stages(roi.mask_head))
                self.meta['mask_threshold'] = roi.test_cfg.mask_thr_binary
                self.outputs += ('masks', )

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        return detect(self.settings, self.run, self.features(images, sizes), sizes)

    def run(self, name: str, regions: Tensor, found: Tensor) -> dict[str, Tensor]:
        """The `Run` of :mod:`.postprocess`."""
        return self.networks[name](regions)


def parts_of(graph: DetectorGraph, images: Tensor) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
    """`features` and the networks on regions as parts of a file, see :meth:`.Task.parts`; maps are channels last."""
    parts = dict(features=(fold_pixels(graph.features, images), dict(images=images.permute(0, 2, 3, 1).contiguous())))
    settings = graph.settings
    for name, network in graph.networks.items():
        step, cfg, most = ((settings['masks'], settings['rcnn'], MASKS) if name == 'masks' else
                           (settings['stages'][0], settings['dense_head'], REGIONS))
        shape = min(most, cfg['max_per_img']), *step['pool']['output_size'], step['pool']['channels']
        parts[name] = network, dict(regions=torch.zeros(shape))
    return {name: (ChannelsLast(network, _channels_last), sample) for name, (network, sample) in parts.items()}


def _channels_last(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return {name: out.permute(0, 2, 3, 1) if out.dim() == 4 else out for name, out in network(x).items()}


class Features(nn.Module):
    """From pixels to the inputs of the proposals.

    For each level `map0`, ... the feature maps `(N, C, h, w)` of RoI heads; `score0`, ... the logits of the anchors
    `(N, A * classes, h, w)`; `delta0`, ... their deltas `(N, 4 * A, h, w)`.
    """

    def __init__(self, detector: nn.Module, pixels: Pixels):
        super().__init__()
        self.pixels = pixels
        self.backbone, self.neck = detector.backbone, getattr(detector, 'neck', None) or nn.Identity()
        self.dense_head, roi = dense_head(detector), getattr(detector, 'roi_head', None)
        extractors = [] if roi is None else extractors_of(roi)
        self.num_maps = max((len(extractor.roi_layers) for extractor in extractors), default=0)

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> dict[str, Tensor]:
        """Takes `(N, 3, H, W)` float32, 0 to 255; without `sizes` padded with what normalizes to `pad_value`."""
        maps = self.neck(self.backbone(self.pixels(images, sizes)))
        scores, deltas = self.dense_head(maps)
        kinds = dict(map=maps[:self.num_maps], score=scores, delta=deltas)
        return {f'{kind}{level}': out for kind, outs in kinds.items() for level, out in enumerate(outs)}


class Heads(nn.Module):
    """From pooled regions `(P, C, h, w)` to `logits` `(P, classes + 1)` and `deltas` `(P, 4 * classes)`."""

    def __init__(self, bbox_head: nn.Module):
        super().__init__()
        self.bbox_head = bbox_head

    def forward(self, regions: Tensor) -> dict[str, Tensor]:
        return dict(zip(('logits', 'deltas'), self.bbox_head(regions), strict=True))


class Masks(nn.Module):
    """From pooled regions `(K, C, h, w)` to `logits` `(K, stages * classes, 2h, 2w)` of masks."""

    def __init__(self, mask_heads: list[nn.Module]):
        super().__init__()
        self.mask_heads = nn.ModuleList(mask_heads)

    def forward(self, regions: Tensor) -> dict[str, Tensor]:
        return dict(logits=torch.cat([head(regions) for head in self.mask_heads], 1))


def settings_of(detector: nn.Module, pixels: Pixels) -> dict:
    """The settings of a detector for :mod:`.postprocess` as plain data, with mmdet's names."""
    head, pad = dense_head(detector), pixels.mean + pixels.pad_value * pixels.std
    cfg, priors = head.test_cfg, head.prior_generator
    settings = dict(
        pad=(pad.flip(0) if pixels.flips else pad).flatten().tolist(),
        anchors=[dict(boxes=boxes.tolist(), stride=list(stride))
                 for boxes, stride in zip(priors.base_anchors, priors.strides, strict=True)],
        dense_head=dict(num_classes=head.cls_out_channels, coder=coder_of(head.bbox_coder), nms_pre=cfg.nms_pre,
                        min_bbox_size=cfg.get('min_bbox_size', -1), score_thr=cfg.get('score_thr', 0),
                        iou_threshold=cfg.nms.iou_threshold, max_per_img=cfg.max_per_img),
        stages=[], masks=None)
    roi = getattr(detector, 'roi_head', None)
    if roi is None:
        return settings
    settings['stages'] = [
        dict(pool=pool_of(extractor), coder=coder_of(head.bbox_coder))
        for head, extractor in zip(stages(roi.bbox_head), stages(roi.bbox_roi_extractor), strict=True)]
    cfg = roi.test_cfg
    settings['rcnn'] = dict(num_classes=stages(roi.bbox_head)[-1].num_classes, score_thr=cfg.score_thr,
                            iou_threshold=cfg.nms.iou_threshold, max_per_img=cfg.max_per_img)
    if roi.with_mask:
        settings['masks'] = dict(pool=pool_of(stages(roi.mask_roi_extractor)[0]),
                                 class_agnostic=stages(roi.mask_head)[0].class_agnostic)
    return settings


def pool_of(extractor: nn.Module) -> dict:
    """The settings of :func:`.postprocess.pool`."""
    layers = extractor.roi_layers
    return dict(output_size=list(layers[0].output_size), spatial_scales=[layer.spatial_scale for layer in layers],
                sampling_ratio=layers[0].sampling_ratio, aligned=layers[0].aligned, channels=extractor.out_channels,
                finest_scale=extractor.finest_scale)


def coder_of(coder: DeltaXYWHBBoxCoder) -> dict:
    """The settings of :func:`.postprocess.decode`."""
    return dict(means=list(coder.means), stds=list(coder.stds), clip_border=coder.clip_border,
                ctr_clamp=coder.ctr_clamp if coder.add_ctr_clamp else None)


def typed_parts(detector: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[type, ...]]]:
    """The parts that :mod:`.postprocess` computes, with their classes; a subclass may compute something else."""
    yield 'detector', detector, (RetinaNet, FasterRCNN, MaskRCNN, CascadeRCNN)
    if type(detector) is RetinaNet:
        yield 'bbox_head', detector.bbox_head, (RetinaHead, FreeAnchorRetinaHead, PISARetinaHead)
        yield 'bbox_coder', detector.bbox_head.bbox_coder, (DeltaXYWHBBoxCoder, )
        return
    rpn, roi = detector.rpn_head, detector.roi_head
    yield 'rpn_head', rpn, (RPNHead, )
    yield 'roi_head', roi, (StandardRoIHead, CascadeRoIHead)
    for head in [rpn, *stages(roi.bbox_head)]:
        yield 'bbox_coder', head.bbox_coder, (DeltaXYWHBBoxCoder, )
    for head in stages(roi.mask_head) if roi.with_mask else ():
        yield 'mask_head', head, (FCNMaskHead, )
    for extractor in extractors_of(roi):
        yield 'RoI extractor', extractor, (SingleRoIExtractor, )
        for layer in extractor.roi_layers:
            yield 'roi_layer', layer, (RoIAlign, )


def extractors_of(roi: nn.Module) -> list[nn.Module]:
    """The RoI extractors of boxes and masks."""
    return stages(roi.bbox_roi_extractor) + (stages(roi.mask_roi_extractor) if roi.with_mask else [])


def obstacle(detector: nn.Module) -> str:
    """Why a detector cannot be one graph with :mod:`.postprocess`, as half a sentence, or ''."""
    for name, part, known in typed_parts(detector):
        if type(part) not in known:
            return f'its {name} is {type(part).__name__}, not {" or ".join(cls.__name__ for cls in known)} of mmdet'
    head, is_single = dense_head(detector), type(detector) is RetinaNet
    settings = {'test_cfg' if is_single else 'test_cfg.rpn': head.test_cfg}
    if not head.use_sigmoid_cls:
        return 'its dense head scores with a softmax, not with a sigmoid (use_sigmoid=True)'
    if is_single:
        if getattr(head.loss_cls, 'custom_cls_channels', False):
            return f'its bbox_head has the scores of {type(head.loss_cls).__name__}'
        cfg = head.test_cfg or {}
        if cfg.get('nms_pre', -1) < 1:
            return f'test_cfg.nms_pre must be a number such as 1000, and is {cfg.get("nms_pre")}'
        if cfg.get('min_bbox_size', -1) > 0:
            return f'test_cfg.min_bbox_size is {cfg.min_bbox_size}, in pixels of the original image'
    else:
        settings['test_cfg.rcnn'] = detector.roi_head.test_cfg
        if reason := _roi_obstacle(detector.roi_head):
            return reason
    for name, cfg in settings.items():
        if not cfg:
            return f'it has no {name}'
        if cfg.get('max_per_img', -1) < 1:  # mmdet keeps all then
            return f'{name}.max_per_img is {cfg.get("max_per_img")}, and files have a fixed number, such as 100'
        if set(cfg.nms) != {'type', 'iou_threshold'} or cfg.nms.type != 'nms':
            return f"{name}.nms is {dict(cfg.nms)}, not dict(type='nms', iou_threshold=...)"
    return ''


def _roi_obstacle(roi: nn.Module) -> str:
    if roi.with_shared_head:
        return 'its roi_head has a shared_head'
    for head in stages(roi.bbox_head):
        if head.custom_cls_channels or head.custom_activation or not head.with_reg or not head.with_cls:
            return 'its bbox_head has no softmax over classes, or no boxes'
    if any(layer.pool_mode != 'avg' for extractor in extractors_of(roi) for layer in extractor.roi_layers):
        return "its RoI extractor pools with pool_mode='max', not 'avg'"
    if roi.with_mask and len({
            (repr(extractor.roi_layers), extractor.finest_scale, head.class_agnostic) for extractor, head in zip(
                stages(roi.mask_roi_extractor), stages(roi.mask_head), strict=True)}) > 1:
        return 'its stages pool differently for masks, or only some of their masks are class-agnostic'
    return ''


def dense_head(detector: nn.Module) -> nn.Module:
    """The head on the neck's maps: of proposals, or of a single-stage detector."""
    return detector.rpn_head if hasattr(detector, 'rpn_head') else detector.bbox_head


def stages(part: nn.Module) -> list[nn.Module]:
    """A part of each stage of a RoI head, which is a list in a `CascadeRoIHead`."""
    return list(part) if isinstance(part, nn.ModuleList) else [part]
