"""The parts of a detector for chips without NMS and RoIAlign, each a graph with static shapes.

:mod:`.host` runs the steps between them in numpy. All tensors are channels last.
"""
from __future__ import annotations

import torch
from mmdet.models.task_modules.coders.delta_xywh_bbox_coder import DeltaXYWHBBoxCoder
from torch import Tensor, nn

from ...utils import PreflightError
from ..edge import fold_pixels
from ..graphs import DetectorGraph
from .detector import dense_head, stages

# The maximum batch size of regions, so that a few detections do not cost the masks of a hundred.
REGIONS = dict(heads=100, masks=20)


class Features(nn.Module):
    """The features, from pixels to the inputs of the proposals.

    Its normalization also changes the padding: images must be padded with the pixel that becomes `pad_value`.
    """

    def __init__(self, graph: DetectorGraph):
        super().__init__()
        self.pixels = graph.pixels
        self.backbone, self.neck = graph.detector.backbone, getattr(graph.detector, 'neck', None) or nn.Identity()
        self.dense_head, roi = dense_head(graph.detector), getattr(graph.detector, 'roi_head', None)
        extractors = [] if roi is None else stages(roi.bbox_roi_extractor)
        if 'masks' in graph.outputs:
            extractors = [*extractors, *stages(roi.mask_roi_extractor)]
        self.num_maps = max((len(extractor.roi_layers) for extractor in extractors), default=0)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """`(N, H, W, 3)` float32, 0 to 255, to tensors `(N, h, w, ...)` for each level.

        Returns:
            `map0`, ... the feature maps `(N, h, w, C)` of RoI heads; `score0`, ... the logits of the anchors
            `(N, h, w, A * classes)`; `delta0`, ... their deltas `(N, h, w, 4 * A)`.
        """
        maps = self.neck(self.backbone(self.pixels(images.permute(0, 3, 1, 2))))
        scores, deltas = self.dense_head(maps)
        kinds = dict(map=maps[:self.num_maps], score=scores, delta=deltas)
        return {f'{kind}{level}': each.permute(0, 2, 3, 1)
                for kind, tensors in kinds.items() for level, each in enumerate(tensors)}


class Heads(nn.Module):
    """Classes and boxes of pooled regions."""

    def __init__(self, bbox_head: nn.Module):
        super().__init__()
        self.bbox_head = bbox_head

    def forward(self, regions: Tensor) -> dict[str, Tensor]:
        """`(P, h, w, C)` to `logits` `(P, classes + 1)` and `deltas` `(P, 4 * classes)`."""
        logits, deltas = self.bbox_head(regions.permute(0, 3, 1, 2))
        return dict(logits=logits, deltas=deltas)


class Masks(nn.Module):
    """Masks of pooled regions."""

    def __init__(self, mask_heads: list[nn.Module]):
        super().__init__()
        self.mask_heads = nn.ModuleList(mask_heads)

    def forward(self, regions: Tensor) -> dict[str, Tensor]:
        """`(K, h, w, C)` to `logits` `(K, 2h, 2w, stages * classes)`."""
        regions = regions.permute(0, 3, 1, 2)
        return dict(logits=torch.cat([head(regions) for head in self.mask_heads], 1).permute(0, 2, 3, 1))


def parts_of(graph: DetectorGraph, images: Tensor) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
    """The parts of a detector, each with a sample of its input.

    They are `features`; with RoI heads `heads`, and before it `refine0`, ... for each earlier stage of a cascade; and
    `masks` if there are some. `images` is a sample `(N, H, W, 3)` float32. The normalization of pixels is folded into
    the first layer; `graph` is unchanged.

    Raises:
        PreflightError: see :func:`check_parts`.
    """
    check_parts(graph)
    parts = dict(features=(fold_pixels(Features(graph), images), dict(images=images)))
    if not hasattr(graph.detector, 'roi_head'):
        return parts
    roi, number = graph.detector.roi_head, min(REGIONS['heads'], graph.detector.rpn_head.test_cfg.max_per_img)
    heads = stages(roi.bbox_head)
    for stage, (head, extractor) in enumerate(zip(heads, stages(roi.bbox_roi_extractor), strict=True), 1):
        name = 'heads' if stage == len(heads) else f'refine{stage - 1}'
        parts[name] = Heads(head), _regions(extractor, number)
    if 'masks' in graph.outputs:
        number = min(REGIONS['masks'], roi.test_cfg.max_per_img)
        parts['masks'] = Masks(stages(roi.mask_head)), _regions(stages(roi.mask_roi_extractor)[0], number)
    return parts


def check_parts(graph: DetectorGraph) -> None:
    """Raises a PreflightError if a detector cannot be split into parts."""
    if graph.pixels.enhancing is not None:
        raise PreflightError(f'this format does not support {type(graph.pixels.enhancing).__name__}, whose output '
                             'would depend on the padding.')


def settings_of(graph: DetectorGraph) -> dict:
    """The settings of a detector for :class:`.host.Host`, as plain data."""
    head, pixels = dense_head(graph.detector), graph.pixels
    pad = pixels.mean + pixels.pad_value * pixels.std
    cfg, priors = head.test_cfg, head.prior_generator
    settings = dict(
        pad=(pad.flip(0) if pixels.flips else pad).flatten().tolist(),
        anchors=[dict(boxes=boxes.tolist(), stride=list(stride))
                 for boxes, stride in zip(priors.base_anchors, priors.strides, strict=True)],
        proposals=dict(coder=coder_of(head.bbox_coder), before=cfg.nms_pre, iou=cfg.nms.iou_threshold,
                       least=cfg.get('min_bbox_size', -1), most=cfg.max_per_img),
        heads=None, masks=None)
    if not hasattr(graph.detector, 'roi_head'):
        settings['proposals']['score'] = cfg.get('score_thr', 0)
        return settings
    roi, cfg = graph.detector.roi_head, graph.detector.roi_head.test_cfg
    *settings['refine'], last = [
        dict(pool=pool_of(extractor), coder=coder_of(each.bbox_coder))
        for each, extractor in zip(stages(roi.bbox_head), stages(roi.bbox_roi_extractor), strict=True)]
    settings['heads'] = last | dict(classes=stages(roi.bbox_head)[-1].num_classes, score=cfg.score_thr,
                                    iou=cfg.nms.iou_threshold, most=cfg.max_per_img)
    if roi.with_mask:
        settings['masks'] = dict(pool=pool_of(stages(roi.mask_roi_extractor)[0]),
                                 any_class=stages(roi.mask_head)[0].class_agnostic)
    return settings


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
