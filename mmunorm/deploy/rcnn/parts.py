"""The parts of a Faster or Mask R-CNN for chips without NMS and RoIAlign, each a graph with static shapes.

:mod:`.host` runs the steps between them in numpy. All tensors are channels last.
"""
from __future__ import annotations

import torch
from mmdet.models.task_modules.coders.delta_xywh_bbox_coder import DeltaXYWHBBoxCoder
from torch import Tensor, nn

from ...utils import PreflightError
from ..edge import fold_pixels
from ..graphs import DetectorGraph

# The maximum batch size of regions, so that a few detections do not cost the masks of a hundred.
REGIONS = dict(heads=100, masks=20)


class Features(nn.Module):
    """The features, from pixels to the inputs of the proposals.

    Its normalization also changes the padding, so images must be padded with the mean to get zeros.
    """

    def __init__(self, graph: DetectorGraph):
        super().__init__()
        self.pixels = graph.pixels
        self.backbone, self.neck, self.rpn_head = graph.detector.backbone, graph.detector.neck, graph.detector.rpn_head
        roi = graph.detector.roi_head
        extractors = [roi.bbox_roi_extractor, *([roi.mask_roi_extractor] if roi.with_mask else [])]
        self.num_maps = max(len(extractor.roi_layers) for extractor in extractors)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """`(N, H, W, 3)` float32, 0 to 255, to tensors `(N, h, w, ...)` for each level.

        Returns:
            `map0`, ... the feature maps `(N, h, w, C)`; `score0`, ... the logits of the anchors `(N, h, w, A)`;
            `delta0`, ... their deltas `(N, h, w, 4 * A)`.
        """
        maps = self.neck(self.backbone(self.pixels(images.permute(0, 3, 1, 2))))
        scores, deltas = self.rpn_head(maps)
        kinds = dict(map=maps[:self.num_maps], score=scores, delta=deltas)
        return {f'{kind}{level}': each.permute(0, 2, 3, 1)
                for kind, tensors in kinds.items() for level, each in enumerate(tensors)}


class Heads(nn.Module):
    """Classes and boxes of pooled regions."""

    def __init__(self, graph: DetectorGraph):
        super().__init__()
        self.bbox_head = graph.detector.roi_head.bbox_head

    def forward(self, regions: Tensor) -> dict[str, Tensor]:
        """`(P, h, w, C)` to `logits` `(P, classes + 1)` and `deltas` `(P, 4 * classes)`."""
        logits, deltas = self.bbox_head(regions.permute(0, 3, 1, 2))
        return dict(logits=logits, deltas=deltas)


class Masks(nn.Module):
    """Masks of pooled regions."""

    def __init__(self, graph: DetectorGraph):
        super().__init__()
        self.mask_head = graph.detector.roi_head.mask_head

    def forward(self, regions: Tensor) -> dict[str, Tensor]:
        """`(K, h, w, C)` to `logits` `(K, 2h, 2w, classes)`."""
        return dict(logits=self.mask_head(regions.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


def parts_of(graph: DetectorGraph, images: Tensor) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
    """The parts of a detector, `features`, `heads` and, of a Mask R-CNN, `masks`; each with a sample of its input.

    `images` is a sample `(N, H, W, 3)` float32. The normalization of pixels is folded into the first layer; `graph` is
    unchanged.

    Raises:
        PreflightError: see :func:`check_parts`.
    """
    check_parts(graph)
    roi, most = graph.detector.roi_head, graph.detector.rpn_head.test_cfg.max_per_img
    parts = dict(features=(fold_pixels(Features(graph), images), dict(images=images)),
                 heads=(Heads(graph), _regions(roi.bbox_roi_extractor, min(REGIONS['heads'], most))))
    if 'masks' in graph.outputs:
        most = roi.test_cfg.max_per_img
        parts['masks'] = Masks(graph), _regions(roi.mask_roi_extractor, min(REGIONS['masks'], most))
    return parts


def check_parts(graph: DetectorGraph) -> None:
    """Raises a PreflightError if a detector cannot be split into parts."""
    if graph.pixels.enhancing is not None:
        raise PreflightError(f'this format does not support {type(graph.pixels.enhancing).__name__}, whose output '
                             'would depend on the padding.')


def settings_of(graph: DetectorGraph) -> dict:
    """The settings of a detector for :class:`.host.Host`, as plain data."""
    rpn, roi, pixels = graph.detector.rpn_head, graph.detector.roi_head, graph.pixels
    priors = rpn.prior_generator
    heads = dict(
        pool=pool_of(roi.bbox_roi_extractor), coder=coder_of(roi.bbox_head.bbox_coder),
        classes=roi.bbox_head.num_classes, score=roi.test_cfg.score_thr, iou=roi.test_cfg.nms.iou_threshold,
        most=roi.test_cfg.max_per_img)
    masks = None
    if roi.with_mask:
        masks = dict(pool=pool_of(roi.mask_roi_extractor), any_class=roi.mask_head.class_agnostic)
    return dict(
        pad=(pixels.mean.flip(0) if pixels.flips else pixels.mean).flatten().tolist(),
        anchors=[dict(boxes=boxes.tolist(), stride=list(stride))
                 for boxes, stride in zip(priors.base_anchors, priors.strides, strict=True)],
        proposals=dict(coder=coder_of(rpn.bbox_coder), before=rpn.test_cfg.nms_pre, iou=rpn.test_cfg.nms.iou_threshold,
                       least=rpn.test_cfg.get('min_bbox_size', -1), most=rpn.test_cfg.max_per_img),
        heads=heads, masks=masks)


def _regions(extractor: nn.Module, number: int) -> dict[str, Tensor]:
    return dict(regions=torch.zeros(number, *extractor.roi_layers[0].output_size, extractor.out_channels))


def pool_of(extractor: nn.Module) -> dict:
    """The settings of :func:`.host.pool`."""
    layers = extractor.roi_layers
    return dict(size=list(layers[0].output_size), scales=[layer.spatial_scale for layer in layers],
                samples=layers[0].sampling_ratio, aligned=layers[0].aligned, finest=extractor.finest_scale)


def coder_of(coder: DeltaXYWHBBoxCoder) -> dict:
    """The settings of :func:`.host.decode`."""
    return dict(means=list(coder.means), stds=list(coder.stds), clip=coder.clip_border,
                furthest=coder.ctr_clamp if coder.add_ctr_clamp else None)
