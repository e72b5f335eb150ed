"""Detectors of mmdet from the feature maps to boxes and masks, with static output shapes.

Every function computes the same as the mmdet method that its docstring names. Boxes that mmdet drops are kept with a
score of 0.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from mmdet.models.dense_heads import AnchorHead
from mmdet.models.detectors import SingleStageDetector
from mmdet.models.task_modules.coders.delta_xywh_bbox_coder import DeltaXYWHBBoxCoder, onnx_delta2bbox
from torch import Tensor, nn
from torchvision.ops import nms, roi_align


class RCNN(nn.Module):
    """The part after the neck of an mmdet detector with two or more stages and without an :func:`obstacle`."""

    def __init__(self, detector: nn.Module):
        super().__init__()
        self.rpn_head, self.roi_head = detector.rpn_head, detector.roi_head

    def forward(self, features: tuple[Tensor, ...], sizes: Tensor) -> tuple[Tensor, ...]:
        """Detects the objects in each image of a batch, whose height and width without padding are `sizes` `(N, 2)`.

        `features` are the maps of the neck, each `(N, C, h, w)` float32. Returns `dets` `(N, K, 5)` float32, x1 y1 x2
        y2 and score, by descending score; `labels` `(N, K)` int64; with a mask head also `masks` `(N, K, h, w)`
        float32, probabilities in the area of each box. Entries after the last detection are 0.
        """
        proposals, found = propose(self.rpn_head, features, sizes)
        dets, labels = detect(self.roi_head, features, proposals, found, sizes)
        if not self.roi_head.with_mask:
            return dets, labels
        return dets, labels, segment(self.roi_head, features, dets, labels)


class SingleStage(nn.Module):
    """The part after the neck of an mmdet RetinaNet, or another one of anchors, without an :func:`obstacle`."""

    def __init__(self, detector: nn.Module):
        super().__init__()
        self.bbox_head = detector.bbox_head

    def forward(self, features: tuple[Tensor, ...], sizes: Tensor) -> tuple[Tensor, Tensor]:
        """`BaseDenseHead.predict`: `dets` and `labels`, as those of :class:`RCNN`."""
        cfg = self.bbox_head.test_cfg
        boxes, scores, labels = (torch.cat(each, 1) for each in zip(
            *candidates(self.bbox_head, features, sizes), strict=True))
        scores = torch.where(scores > cfg.get('score_thr', 0), scores, 0.)
        # Classes do not overlap: `batched_nms` of mmcv moves their boxes apart.
        step = torch.where(scores[..., None] > 0, boxes, 0.).amax((1, 2)) + 1
        apart = boxes + (labels * step[:, None])[..., None]
        return best_of(boxes, scores * nms_mask(apart, scores, cfg.nms.iou_threshold), labels, cfg.max_per_img)


def obstacle(detector: nn.Module) -> str:
    """Why :class:`RCNN` or :class:`SingleStage` cannot replace parts of a detector, as half a sentence, or ''."""
    is_single = isinstance(detector, SingleStageDetector)
    if reason := _single_stage_obstacle(detector) if is_single else _roi_obstacle(detector):
        return reason
    name, head = ('bbox_head' if is_single else 'rpn_head'), dense_head(detector)
    if not head.use_sigmoid_cls:
        return f'its {name} scores with a softmax, not with a sigmoid (use_sigmoid=True)'
    heads, settings = [(name, head)], {'test_cfg' if is_single else 'test_cfg.rpn': head.test_cfg}
    if not is_single:
        heads += [('bbox_head', each) for each in stages(detector.roi_head.bbox_head)]
        settings['test_cfg.rcnn'] = detector.roi_head.test_cfg
    for name, head in heads:
        if type(head.bbox_coder) is not DeltaXYWHBBoxCoder:
            return f'the bbox_coder of its {name} is {type(head.bbox_coder).__name__}, not DeltaXYWHBBoxCoder'
    for name, cfg in settings.items():
        if not cfg:
            return f'it has no {name}'
        if cfg.get('max_per_img', -1) < 1:  # mmdet keeps all then
            return f'{name}.max_per_img is {cfg.get("max_per_img")}, and files have a fixed number, such as 100'
        if set(cfg.nms) != {'type', 'iou_threshold'} or cfg.nms.type != 'nms':
            return f"{name}.nms is {dict(cfg.nms)}, not dict(type='nms', iou_threshold=...)"
    return ''


def _single_stage_obstacle(detector: nn.Module) -> str:
    head = detector.bbox_head
    if type(detector).predict is not SingleStageDetector.predict or not isinstance(head, AnchorHead):
        return f'its bbox_head is {type(head).__name__}, not one such as RetinaHead'
    for method in ('forward', 'predict', 'predict_by_feat', '_predict_by_feat_single', '_bbox_post_process'):
        if getattr(type(head), method) is not getattr(AnchorHead, method):
            return f'its bbox_head is {type(head).__name__}, whose {method} is not that of AnchorHead'
    if getattr(head.loss_cls, 'custom_cls_channels', False):
        return f'its bbox_head has the scores of {type(head.loss_cls).__name__}'
    cfg = head.test_cfg or {}
    if cfg.get('nms_pre', -1) < 1:
        return f'test_cfg.nms_pre must be a number such as 1000, and is {cfg.get("nms_pre")}'
    if cfg.get('min_bbox_size', -1) > 0:
        return f'test_cfg.min_bbox_size is {cfg.min_bbox_size}, in pixels of the original image'
    return ''


def _roi_obstacle(detector: nn.Module) -> str:
    rpn, roi = getattr(detector, 'rpn_head', None), getattr(detector, 'roi_head', None)
    expected = dict(detector=('RetinaNet', 'FasterRCNN', 'MaskRCNN', 'CascadeRCNN'), rpn_head=('RPNHead', ),
                    roi_head=('StandardRoIHead', 'CascadeRoIHead'))
    for name, part in dict(detector=detector, rpn_head=rpn, roi_head=roi).items():
        if type(part).__name__ not in expected[name]:
            return f'its {name} is {type(part).__name__}, not {" or ".join(expected[name])}'
    if roi.with_shared_head:
        return 'its roi_head has a shared_head'
    for head in stages(roi.bbox_head):
        if head.custom_cls_channels or head.custom_activation or not head.with_reg or not head.with_cls:
            return 'its bbox_head has no softmax over classes, or no boxes'
    mask_extractors, mask_heads = ((stages(roi.mask_roi_extractor), stages(roi.mask_head)) if roi.with_mask
                                   else ([], []))
    for extractor in [*stages(roi.bbox_roi_extractor), *mask_extractors]:
        if type(extractor).__name__ != 'SingleRoIExtractor':
            return f'its RoI extractor is {type(extractor).__name__}, not SingleRoIExtractor'
        if any(type(layer).__name__ != 'RoIAlign' or layer.pool_mode != 'avg' for layer in extractor.roi_layers):
            return "its RoI extractor pools with another layer than RoIAlign with pool_mode='avg'"
    for head in mask_heads:
        if type(head).__name__ != 'FCNMaskHead':
            return f'its mask_head is {type(head).__name__}, not FCNMaskHead'
    if len({(repr(extractor.roi_layers), extractor.finest_scale, head.class_agnostic)
            for extractor, head in zip(mask_extractors, mask_heads, strict=True)}) > 1:
        return 'its stages pool differently for masks, or only some of their masks are class-agnostic'
    return ''


def dense_head(detector: nn.Module) -> nn.Module:
    """The head on the neck's maps: of proposals, or of a single-stage detector."""
    return detector.rpn_head if hasattr(detector, 'rpn_head') else detector.bbox_head


def stages(part: nn.Module) -> list[nn.Module]:
    """A part of each stage of a RoI head, which is a list in a `CascadeRoIHead`."""
    return list(part) if isinstance(part, nn.ModuleList) else [part]


def candidates(head: nn.Module, features: tuple[Tensor, ...],
               sizes: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """`BaseDenseHead._predict_by_feat_single` before its NMS.

    Returns boxes `(N, P, 4)`, scores and classes `(N, P)` of each level.
    """
    cfg, classes = head.test_cfg, head.cls_out_channels
    scores, deltas = head(features)
    shapes = [score.shape[-2:] for score in scores]
    priors = head.prior_generator.grid_priors(shapes, device=features[0].device)
    found = []
    for score, delta, prior in zip(scores, deltas, priors, strict=True):
        score = score.permute(0, 2, 3, 1).flatten(1).sigmoid()
        delta = delta.permute(0, 2, 3, 1).reshape(delta.shape[0], -1, 4)
        number = score.shape[1]
        if not isinstance(number, int):  # dynamic: there may be fewer; boxes with score 0 are padding
            number = cfg.nms_pre
            score = F.pad(score, (0, number))
            delta, prior = (F.pad(boxes, (0, 0, 0, number)) for boxes in (delta, prior))
        elif cfg.nms_pre > 0:
            number = min(number, cfg.nms_pre)
        score, best = score.topk(number)
        place = torch.div(best, classes, rounding_mode='floor')
        boxes = decode(head.bbox_coder, prior[place], _pick(delta, place), sizes)
        if cfg.get('min_bbox_size', -1) >= 0:
            large = (boxes[..., 2:] - boxes[..., :2] > cfg.min_bbox_size).all(-1)
            score = torch.where(large, score, 0.)
        found.append((boxes, score, best % classes))
    return found


def propose(rpn_head: nn.Module, features: tuple[Tensor, ...], sizes: Tensor) -> tuple[Tensor, Tensor]:
    """`RPNHead.predict`: boxes `(N, P, 4)` and which of them are proposals `(N, P)` bool, the best first."""
    cfg = rpn_head.test_cfg
    levels = [(boxes, score * nms_mask(boxes, score, cfg.nms.iou_threshold))
              for boxes, score, _ in candidates(rpn_head, features, sizes)]
    boxes, scores = (torch.cat(each, 1) for each in zip(*levels, strict=True))
    scores, best = scores.topk(min(cfg.max_per_img, scores.shape[1]))
    return _pick(boxes, best), scores > 0


def detect(roi_head: nn.Module, features: tuple[Tensor, ...], proposals: Tensor, found: Tensor,
           sizes: Tensor) -> tuple[Tensor, Tensor]:
    """`predict_bbox` of `StandardRoIHead` and `CascadeRoIHead`: `(N, K, 5)` and their classes `(N, K)`."""
    cfg, boxes, logits = roi_head.test_cfg, proposals, []
    batch, number = found.shape
    heads = stages(roi_head.bbox_head)
    for head, extractor in zip(heads, stages(roi_head.bbox_roi_extractor), strict=True):
        own, deltas = head(pool(extractor, features, boxes))
        logits.append(own)
        deltas = deltas.reshape(batch, number, -1)
        if head is not heads[-1]:
            boxes = refine(head, boxes, own, deltas, sizes)
    scores = (sum(logits[1:], logits[0]) / len(logits)).softmax(-1)[:, :-1].reshape(batch, number, head.num_classes)
    scores = torch.where(found[..., None], scores, 0.)
    boxes = decode(head.bbox_coder, boxes, deltas, sizes)
    boxes = boxes.reshape(batch, number, -1, 4).expand(-1, -1, head.num_classes, -1)

    # NMS runs separately for each class, with its own boxes.
    boxes, scores = boxes.permute(0, 2, 1, 3), scores.permute(0, 2, 1)
    scores = scores * (scores > cfg.score_thr)
    kept = nms_mask(boxes.flatten(0, 1), scores.flatten(0, 1), cfg.nms.iou_threshold)
    scores = scores.flatten(1) * kept.reshape(batch, -1)
    labels = torch.arange(head.num_classes, device=scores.device)[:, None].expand(batch, -1, number)
    return best_of(boxes.flatten(1, 2), scores, labels.flatten(1), cfg.max_per_img)


def refine(head: nn.Module, boxes: Tensor, logits: Tensor, deltas: Tensor, sizes: Tensor) -> Tensor:
    """`BBoxHead.regress_by_class`: boxes `(N, P, 4)` moved by the deltas of their best class."""
    if not head.reg_class_agnostic:
        best = logits[:, :-1].argmax(1).reshape(*boxes.shape[:2], 1, 1)
        deltas = deltas.unflatten(2, (-1, 4)).gather(2, best.expand(-1, -1, -1, 4)).squeeze(2)
    return decode(head.bbox_coder, boxes, deltas, sizes)


def best_of(boxes: Tensor, scores: Tensor, labels: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The detections `(N, K, 5)` with the largest scores, and their labels `(N, K)`; both 0 where a score is."""
    scores, best = scores.topk(min(number, scores.shape[1]))
    dets, found = torch.cat([_pick(boxes, best), scores[..., None]], -1), scores > 0
    return torch.where(found[..., None], dets, 0.), torch.where(found, labels.gather(1, best), 0)


def segment(roi_head: nn.Module, features: tuple[Tensor, ...], dets: Tensor, labels: Tensor) -> Tensor:
    """`predict_mask` of `StandardRoIHead` and `CascadeRoIHead` without pasting: the mask of each box's own class.

    Returns `(N, K, h, w)`, the mean over the stages, whose regions are the same.
    """
    regions, heads = pool(stages(roi_head.mask_roi_extractor)[0], features, dets[..., :4]), stages(roi_head.mask_head)
    masks = torch.stack([head(regions) for head in heads])
    if not heads[0].class_agnostic:
        masks = masks[:, torch.arange(masks.shape[1], device=masks.device), labels.flatten()]
    masks = masks.sigmoid().mean(0).reshape(*labels.shape, *masks.shape[-2:])
    return torch.where(dets[..., 4, None, None] > 0, masks, 0.)


def decode(coder: DeltaXYWHBBoxCoder, boxes: Tensor, deltas: Tensor, sizes: Tensor) -> Tensor:
    """`DeltaXYWHBBoxCoder.decode`: boxes `(N, P, 4)` moved by `(N, P, 4 * classes)`, inside of images of `sizes`.

    Uses mmdet's batched function; the stock method takes the size of one image.
    """
    return onnx_delta2bbox(boxes, deltas, coder.means, coder.stds, sizes, clip_border=coder.clip_border,
                           add_ctr_clamp=coder.add_ctr_clamp, ctr_clamp=coder.ctr_clamp)


def pool(extractor: nn.Module, features: tuple[Tensor, ...], boxes: Tensor) -> Tensor:
    """`SingleRoIExtractor.forward`: the features `(N * P, C, h, w)` in boxes `(N, P, 4)`.

    Each level pools all boxes, and boxes of other levels are replaced by empty ones, which have no samples and cost
    almost no time. mmdet gathers the boxes of each level, whose number depends on the image.
    """
    batch, number = boxes.shape[:2]
    index = torch.arange(batch, device=boxes.device, dtype=boxes.dtype)
    boxes = boxes.flatten(0, 1)
    index = index[:, None].expand(-1, number).reshape(-1, 1)
    features = features[:extractor.num_inputs]
    levels = roi_levels(extractor, boxes, len(features))
    pooled = None
    for level, (layer, feature) in enumerate(zip(extractor.roi_layers, features, strict=True)):
        own = levels == level
        rois = torch.cat([index, torch.where(own[:, None], boxes, 0.)], 1)
        part = roi_align(feature, rois, layer.output_size, layer.spatial_scale, layer.sampling_ratio, layer.aligned)
        pooled = part if pooled is None else torch.where(own[:, None, None, None], part, pooled)
    return pooled


def roi_levels(extractor: nn.Module, boxes: Tensor, num_levels: int) -> Tensor:
    """`SingleRoIExtractor.map_roi_levels`: the level of each box `(P, 4)`, `(P, )` int64.

    Compares with powers of two instead of using the logarithm, which runtimes round differently.
    """
    scale = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt() / extractor.finest_scale + 1e-6
    return sum(((scale >= 2**level).long() for level in range(1, num_levels)), torch.zeros_like(scale).long())


def nms_mask(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The boxes that greedy NMS keeps in each of `B` sets: `(B, M)` float32, 1 for a box that is kept, else 0.

    It is a custom operator so that ONNX gets one NonMaxSuppression node for all sets: torchvision's takes one set, and
    the number of indices that it returns depends on the data.

    Args:
        boxes (Tensor): `(B, M, 4)` float32, x1 y1 x2 y2.
        scores (Tensor): `(B, M)` float32; boxes with score 0 are padding.
        iou_threshold (float): a box is dropped if its IoU with a kept one is above this.
    """
    return torch.ops.mmunorm.nms_mask(boxes, scores, iou_threshold)


# With a Library, because torch 2.1 has no torch.library.custom_op.
_OPERATORS = torch.library.Library('mmunorm', 'FRAGMENT')
_OPERATORS.define('nms_mask(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor')


@torch.library.impl(_OPERATORS, 'nms_mask', 'CompositeExplicitAutograd')
def _nms_mask(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    mask = torch.zeros_like(scores)
    for kept, own_boxes, own_scores in zip(mask, boxes, scores, strict=True):
        candidates = (own_scores > 0).nonzero().squeeze(1)
        kept[candidates[nms(own_boxes[candidates], own_scores[candidates], iou_threshold)]] = 1
    return mask


@torch.library.impl(_OPERATORS, 'nms_mask', 'Meta')
def _shape_of_mask(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return torch.empty_like(scores)


def _pick(boxes: Tensor, index: Tensor) -> Tensor:
    """The boxes `(N, K, 4)` at `index` `(N, K)` of `(N, M, 4)`."""
    return boxes.gather(1, index[..., None].expand(-1, -1, 4))
