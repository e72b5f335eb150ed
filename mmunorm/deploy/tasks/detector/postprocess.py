"""A detector of mmdet after its neck, from plain settings: proposals, pooling, NMS, boxes and masks.

The networks between the steps are called by name, so that one implementation serves torch's graphs and the files of
chips, whose parts run elsewhere. All shapes are static. Every function computes the same as the mmdet method that its
docstring names; boxes that mmdet drops are kept with a score of 0.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import nms, roi_align

MAX_LOG_RATIO = abs(float(np.log(16 / 1000)))  # between the sides of two boxes: `wh_ratio_clip` of mmdet's coder
# `run(name, regions, found)` runs `refine0`, ..., `heads` or `masks` on pooled regions `(P, C, h, w)` and returns its
# outputs by name. Those of regions that are not `found` `(P, )` are ignored.
Run = Callable[[str, Tensor, Tensor], dict[str, Tensor]]


def detect(settings: dict, run: Run, features: dict[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
    """The objects in each image of a batch, from the outputs of :class:`.graph.Features`.

    `settings` are those of :func:`.graph.settings_of`, `sizes` `(N, 2)` height and width without padding.

    Returns `dets` `(N, K, 5)` float32, x1 y1 x2 y2 and score, the best first; `labels` `(N, K)` int64; with masks also
    `masks` `(N, K, h, w)` float32, probabilities in the area of each box. All are 0 after the last detection.
    """
    levels = candidates(settings, features, sizes)
    if not settings['stages']:
        return single_stage(settings['dense_head'], levels)
    maps = [features[f'map{level}'] for level in range(sum(name.startswith('map') for name in features))]
    proposals, found = propose(settings['dense_head'], levels)
    dets, labels = detect_regions(settings, run, maps, proposals, found, sizes)
    if settings['masks'] is None:
        return dets, labels
    return dets, labels, segment(settings, run, maps, dets, labels)


def candidates(settings: dict, features: dict[str, Tensor], sizes: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """`BaseDenseHead._predict_by_feat_single` before its NMS.

    Returns boxes `(N, P, 4)`, scores and classes `(N, P)` of each level.
    """
    cfg, levels = settings['dense_head'], []
    for level, anchors in enumerate(settings['anchors']):
        score, delta = features[f'score{level}'], features[f'delta{level}']
        prior = grid_priors(anchors, *score.shape[-2:])
        score = score.permute(0, 2, 3, 1).flatten(1).sigmoid()
        delta = delta.permute(0, 2, 3, 1).reshape(delta.shape[0], -1, 4)
        score, best = score.topk(min(score.shape[1], cfg['nms_pre']) if cfg['nms_pre'] > 0 else score.shape[1])
        anchor = torch.div(best, cfg['num_classes'], rounding_mode='floor')
        boxes = decode(cfg['coder'], prior[anchor], take(delta, anchor), sizes)
        if cfg['min_bbox_size'] >= 0:
            is_large = (boxes[..., 2:] - boxes[..., :2] > cfg['min_bbox_size']).all(-1)
            score = torch.where(is_large, score, 0.)
        levels.append((boxes, score, best % cfg['num_classes']))
    return levels


def grid_priors(anchors: dict, height: int, width: int) -> Tensor:
    """`AnchorGenerator.single_level_grid_priors`: the anchors `(height * width * A, 4)` of a map."""
    across, down = (float(stride) for stride in anchors['stride'])
    x = (torch.arange(width).float() * across).expand(height, -1)
    y = (torch.arange(height).float() * down)[:, None].expand(-1, width)
    return (torch.stack([x, y, x, y], -1)[:, :, None] + torch.tensor(anchors['boxes'])).reshape(-1, 4)


def single_stage(cfg: dict, levels: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`BaseDenseHead.predict` after :func:`candidates`: `dets` and `labels`."""
    boxes, scores, labels = (torch.cat(level, 1) for level in zip(*levels, strict=True))
    scores = torch.where(scores > cfg['score_thr'], scores, 0.)
    # Classes do not overlap: `batched_nms` of mmcv moves their boxes apart.
    step = torch.where(scores[..., None] > 0, boxes, 0.).amax((1, 2)) + 1
    apart = boxes + (labels * step[:, None])[..., None]
    return best_of(boxes, scores * nms_mask(apart, scores, cfg['iou_threshold']), labels, cfg['max_per_img'])


def propose(cfg: dict, levels: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`RPNHead.predict` after :func:`candidates`: boxes `(N, P, 4)` and which of them are proposals `(N, P)` bool."""
    kept = [(boxes, score * nms_mask(boxes, score, cfg['iou_threshold'])) for boxes, score, _ in levels]
    boxes, scores = (torch.cat(level, 1) for level in zip(*kept, strict=True))
    scores, best = scores.topk(min(cfg['max_per_img'], scores.shape[1]))
    return take(boxes, best), scores > 0


def detect_regions(settings: dict, run: Run, maps: list[Tensor], proposals: Tensor, found: Tensor,
                   sizes: Tensor) -> tuple[Tensor, Tensor]:
    """`predict_bbox` of `StandardRoIHead` and `CascadeRoIHead`: `dets` and `labels`."""
    cfg, boxes, logits = settings['rcnn'], proposals, []
    batch, number = found.shape
    for index, stage in enumerate(settings['stages']):
        is_last = index == len(settings['stages']) - 1
        out = run('heads' if is_last else f'refine{index}', pool(stage['pool'], maps, boxes), found.flatten())
        logits.append(out['logits'])
        deltas = out['deltas'].reshape(batch, number, -1)
        if not is_last:
            boxes = refine(stage['coder'], boxes, out['logits'], deltas, sizes)
    scores = (sum(logits[1:], logits[0]) / len(logits)).softmax(-1)[:, :-1].reshape(batch, number, cfg['num_classes'])
    scores = torch.where(found[..., None], scores, 0.)
    boxes = decode(stage['coder'], boxes, deltas, sizes)
    boxes = boxes.reshape(batch, number, -1, 4).expand(-1, -1, cfg['num_classes'], -1)

    # NMS runs separately for each class, with its own boxes.
    boxes, scores = boxes.permute(0, 2, 1, 3), scores.permute(0, 2, 1)
    scores = scores * (scores > cfg['score_thr'])
    kept = nms_mask(boxes.flatten(0, 1), scores.flatten(0, 1), cfg['iou_threshold'])
    scores = scores.flatten(1) * kept.reshape(batch, -1)
    labels = torch.arange(cfg['num_classes'])[:, None].expand(batch, -1, number)
    return best_of(boxes.flatten(1, 2), scores, labels.flatten(1), cfg['max_per_img'])


def refine(coder: dict, boxes: Tensor, logits: Tensor, deltas: Tensor, sizes: Tensor) -> Tensor:
    """`BBoxHead.regress_by_class`: boxes `(N, P, 4)` moved by the deltas of their best class, or by the only ones."""
    deltas = deltas.unflatten(2, (-1, 4))
    if deltas.shape[2] > 1:
        best = logits[:, :-1].argmax(1).reshape(*boxes.shape[:2], 1, 1)
        deltas = deltas.gather(2, best.expand(-1, -1, -1, 4))
    return decode(coder, boxes, deltas.squeeze(2), sizes)


def best_of(boxes: Tensor, scores: Tensor, labels: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The detections `(N, K, 5)` with the largest scores, and their labels `(N, K)`; both 0 where a score is."""
    scores, best = scores.topk(min(number, scores.shape[1]))
    dets, found = torch.cat([take(boxes, best), scores[..., None]], -1), scores > 0
    return torch.where(found[..., None], dets, 0.), torch.where(found, labels.gather(1, best), 0)


def segment(settings: dict, run: Run, maps: list[Tensor], dets: Tensor, labels: Tensor) -> Tensor:
    """`predict_mask` of `StandardRoIHead` and `CascadeRoIHead` without pasting: the mask of each box's own class.

    Returns `(N, K, h, w)`, the mean over the stages, whose regions are the same.
    """
    cfg, found = settings['masks'], dets[..., 4] > 0
    logits = run('masks', pool(cfg['pool'], maps, dets[..., :4]), found.flatten())['logits']
    masks = logits.unflatten(1, (len(settings['stages']), -1)).transpose(0, 1)
    labels = torch.zeros_like(labels) if cfg['class_agnostic'] else labels
    masks = masks[:, torch.arange(masks.shape[1]), labels.flatten()]
    masks = masks.sigmoid().mean(0).reshape(*labels.shape, *masks.shape[-2:])
    return torch.where(found[..., None, None], masks, 0.)


def decode(coder: dict, boxes: Tensor, deltas: Tensor, sizes: Tensor) -> Tensor:
    """`DeltaXYWHBBoxCoder.decode`: boxes `(N, P, 4)` moved by `(N, P, 4 * classes)`, inside of images of `sizes`."""
    shape = deltas.shape
    deltas = deltas.unflatten(-1, (-1, 4)) * torch.tensor(coder['stds']) + torch.tensor(coder['means'])
    corner, sides = boxes[..., None, :2], (boxes[..., 2:] - boxes[..., :2])[..., None, :]
    move, grow = sides * deltas[..., :2], deltas[..., 2:]
    if coder['ctr_clamp'] is None:
        grow = grow.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    else:
        move, grow = move.clamp(-coder['ctr_clamp'], coder['ctr_clamp']), grow.clamp(max=MAX_LOG_RATIO)
    center, half = corner + sides / 2 + move, sides * grow.exp() / 2
    moved = torch.cat([center - half, center + half], -1)
    if coder['clip_border']:
        moved = torch.minimum(moved.clamp(min=0), sizes.flip(1).repeat(1, 2)[:, None, None])
    return moved.reshape(shape)


def pool(cfg: dict, maps: list[Tensor], boxes: Tensor) -> Tensor:
    """`SingleRoIExtractor.forward`: the features `(N * P, C, h, w)` in boxes `(N, P, 4)`.

    Each level pools all boxes, as the number of its own depends on the image; the others are empty and cost nothing.
    """
    batch, number = boxes.shape[:2]
    index = torch.arange(batch, dtype=boxes.dtype)[:, None].expand(-1, number).reshape(-1, 1)
    boxes = boxes.flatten(0, 1)
    levels = roi_levels(boxes, cfg['finest_scale'], len(cfg['spatial_scales']))
    pooled = None
    for level, scale in enumerate(cfg['spatial_scales']):
        is_level = levels == level
        rois = torch.cat([index, torch.where(is_level[:, None], boxes, 0.)], 1)
        part = roi_align(maps[level], rois, cfg['output_size'], scale, cfg['sampling_ratio'], cfg['aligned'])
        pooled = part if pooled is None else torch.where(is_level[:, None, None, None], part, pooled)
    return pooled


def roi_levels(boxes: Tensor, finest_scale: int, num_levels: int) -> Tensor:
    """`SingleRoIExtractor.map_roi_levels`: the level of each box `(P, 4)`, `(P, )` int64.

    Compares with powers of two instead of using the logarithm, which runtimes round differently.
    """
    scale = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt() / finest_scale + 1e-6
    return sum(((scale >= 2**level).long() for level in range(1, num_levels)), torch.zeros_like(scale).long())


# With a Library, because torch 2.1 has no torch.library.custom_op.
_OPERATORS = torch.library.Library('mmunorm', 'FRAGMENT')
_OPERATORS.define('nms_mask(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor')
nms_mask = torch.ops.mmunorm.nms_mask


@torch.library.impl(_OPERATORS, 'nms_mask', 'CompositeExplicitAutograd')
def _nms_mask(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Greedy NMS in each of `B` sets of boxes `(B, M, 4)`: `(B, M)` float32, 1 for a box that is kept, else 0.

    Boxes with a score of 0 are padding. It is a custom operator so that ONNX gets one NonMaxSuppression node for all
    sets: torchvision's takes one set, and the number of indices that it returns depends on the data.
    """
    mask = torch.zeros_like(scores)
    for kept, set_boxes, set_scores in zip(mask, boxes, scores, strict=True):
        valid = (set_scores > 0).nonzero().squeeze(1)
        kept[valid[nms(set_boxes[valid], set_scores[valid], iou_threshold)]] = 1
    return mask


@torch.library.impl(_OPERATORS, 'nms_mask', 'Meta')
def _shape_of_mask(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return torch.empty_like(scores)


def take(boxes: Tensor, index: Tensor) -> Tensor:
    """The boxes `(N, K, 4)` at `index` `(N, K)` of `(N, M, 4)`."""
    return boxes.gather(1, index[..., None].expand(-1, -1, 4))
