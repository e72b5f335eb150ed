"""Faster and Mask R-CNN from the feature maps to boxes and masks, with static output shapes.

Every function computes the same as the mmdet method that its docstring names. Boxes that mmdet drops are kept with a
score of 0.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from mmdet.models.task_modules.coders.delta_xywh_bbox_coder import DeltaXYWHBBoxCoder, onnx_delta2bbox
from torch import Tensor, nn
from torchvision.ops import nms, roi_align


class RCNN(nn.Module):
    """The part after the neck of an mmdet `FasterRCNN` or `MaskRCNN` without an :func:`rcnn_obstacle`."""

    def __init__(self, detector: nn.Module):
        super().__init__()
        self.rpn_head, self.roi_head = detector.rpn_head, detector.roi_head

    def forward(self, features: tuple[Tensor, ...], sizes: Tensor) -> tuple[Tensor, ...]:
        """Detects the objects in each image of a batch, whose height and width without padding are `sizes` `(N, 2)`.

        `features` are the maps of the neck, each `(N, C, h, w)` float32. Returns `dets` `(N, K, 5)` float32, x1 y1 x2
        y2 and score, by descending score; `labels` `(N, K)` int64; for a Mask R-CNN also `masks` `(N, K, h, w)`
        float32, probabilities in the area of each box. Entries after the last detection are 0.
        """
        proposals, found = propose(self.rpn_head, features, sizes)
        dets, labels = detect(self.roi_head, features, proposals, found, sizes)
        if not self.roi_head.with_mask:
            return dets, labels
        return dets, labels, segment(self.roi_head, features, dets, labels)


def rcnn_obstacle(detector: nn.Module) -> str:
    """Why :class:`RCNN` cannot replace parts of a detector, as half a sentence, or ''."""
    rpn, roi = getattr(detector, 'rpn_head', None), getattr(detector, 'roi_head', None)
    expected = dict(detector=('FasterRCNN', 'MaskRCNN'), rpn_head=('RPNHead', ), roi_head=('StandardRoIHead', ))
    for name, part in dict(detector=detector, rpn_head=rpn, roi_head=roi).items():
        if type(part).__name__ not in expected[name]:
            return f'its {name} is {type(part).__name__}, not {" or ".join(expected[name])}'
    if not rpn.use_sigmoid_cls:
        return 'its rpn_head scores with a softmax, not with a sigmoid (use_sigmoid=True)'
    if roi.with_shared_head:
        return 'its roi_head has a shared_head'
    if roi.bbox_head.custom_cls_channels or not roi.bbox_head.with_reg or not roi.bbox_head.with_cls:
        return 'its bbox_head has no softmax over classes, or no boxes'
    for name, coder in (('rpn_head', rpn.bbox_coder), ('bbox_head', roi.bbox_head.bbox_coder)):
        if type(coder) is not DeltaXYWHBBoxCoder:
            return f'the bbox_coder of its {name} is {type(coder).__name__}, not DeltaXYWHBBoxCoder'
    for name, cfg in (('rpn', rpn.test_cfg), ('rcnn', roi.test_cfg)):
        if set(cfg.nms) != {'type', 'iou_threshold'} or cfg.nms.type != 'nms':
            return f"test_cfg.{name}.nms is {dict(cfg.nms)}, not dict(type='nms', iou_threshold=...)"
    extractors = [roi.bbox_roi_extractor] + ([roi.mask_roi_extractor] if roi.with_mask else [])
    for extractor in extractors:
        if type(extractor).__name__ != 'SingleRoIExtractor':
            return f'its RoI extractor is {type(extractor).__name__}, not SingleRoIExtractor'
        if any(type(layer).__name__ != 'RoIAlign' or layer.pool_mode != 'avg' for layer in extractor.roi_layers):
            return "its RoI extractor pools with another layer than RoIAlign with pool_mode='avg'"
    if roi.with_mask and type(roi.mask_head).__name__ != 'FCNMaskHead':
        return f'its mask_head is {type(roi.mask_head).__name__}, not FCNMaskHead'
    return ''


def propose(rpn_head: nn.Module, features: tuple[Tensor, ...], sizes: Tensor) -> tuple[Tensor, Tensor]:
    """`RPNHead.predict`: boxes `(N, P, 4)` and which of them are proposals `(N, P)` bool, the best first."""
    cfg = rpn_head.test_cfg
    scores, deltas = rpn_head(features)
    shapes = [score.shape[-2:] for score in scores]
    priors = rpn_head.prior_generator.grid_priors(shapes, device=features[0].device)
    kept_boxes, kept_scores = [], []
    for score, delta, prior in zip(scores, deltas, priors, strict=True):
        score = score.permute(0, 2, 3, 1).flatten(1).sigmoid()
        delta = delta.permute(0, 2, 3, 1).reshape(delta.shape[0], -1, 4)
        is_open = not isinstance(score.shape[1], int)  # dynamic
        if is_open:  # there may be fewer; boxes with score 0 are padding
            score = F.pad(score, (0, cfg.nms_pre))
            delta, prior = (F.pad(boxes, (0, 0, 0, cfg.nms_pre)) for boxes in (delta, prior))
        if is_open or 0 < cfg.nms_pre < score.shape[1]:
            score, best = score.topk(cfg.nms_pre)
            delta, prior = _pick(delta, best), prior[best]
        else:
            prior = prior.expand_as(delta)
        boxes = decode(rpn_head.bbox_coder, prior, delta, sizes)
        if cfg.get('min_bbox_size', -1) >= 0:
            large = (boxes[..., 2:] - boxes[..., :2] > cfg.min_bbox_size).all(-1)
            score = torch.where(large, score, 0.)
        kept_boxes.append(boxes)
        kept_scores.append(score * nms_mask(boxes, score, cfg.nms.iou_threshold))
    scores = torch.cat(kept_scores, 1)
    scores, best = scores.topk(min(cfg.max_per_img, scores.shape[1]))
    return _pick(torch.cat(kept_boxes, 1), best), scores > 0


def detect(roi_head: nn.Module, features: tuple[Tensor, ...], proposals: Tensor, found: Tensor,
           sizes: Tensor) -> tuple[Tensor, Tensor]:
    """`StandardRoIHead.predict_bbox`: detections `(N, K, 5)` and their classes `(N, K)`."""
    cfg, head = roi_head.test_cfg, roi_head.bbox_head
    batch, number = found.shape
    logits, deltas = head(pool(roi_head.bbox_roi_extractor, features, proposals))
    scores = logits.softmax(-1)[:, :-1].reshape(batch, number, head.num_classes)
    scores = torch.where(found[..., None], scores, 0.)
    boxes = decode(head.bbox_coder, proposals, deltas.reshape(batch, number, -1), sizes)
    boxes = boxes.reshape(batch, number, -1, 4).expand(-1, -1, head.num_classes, -1)

    # NMS runs separately for each class, with its own boxes.
    boxes, scores = boxes.permute(0, 2, 1, 3), scores.permute(0, 2, 1)
    scores = scores * (scores > cfg.score_thr)
    kept = nms_mask(boxes.flatten(0, 1), scores.flatten(0, 1), cfg.nms.iou_threshold)
    scores = scores.flatten(1) * kept.reshape(batch, -1)
    scores, best = scores.topk(min(cfg.max_per_img, scores.shape[1]))
    dets = torch.cat([_pick(boxes.flatten(1, 2), best), scores[..., None]], -1)
    is_object = scores > 0
    labels = torch.div(best, number, rounding_mode='floor')
    return torch.where(is_object[..., None], dets, 0.), torch.where(is_object, labels, 0)


def segment(roi_head: nn.Module, features: tuple[Tensor, ...], dets: Tensor, labels: Tensor) -> Tensor:
    """`StandardRoIHead.predict_mask` without pasting: the mask of each box's own class, `(N, K, h, w)`."""
    masks = roi_head.mask_head(pool(roi_head.mask_roi_extractor, features, dets[..., :4]))
    if not roi_head.mask_head.class_agnostic:
        masks = masks[torch.arange(masks.shape[0], device=masks.device), labels.flatten()]
    masks = masks.reshape(*labels.shape, *masks.shape[-2:]).sigmoid()
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
