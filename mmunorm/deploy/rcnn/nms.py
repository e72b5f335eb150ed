"""Non-maximum suppression of many sets of boxes at once, with an output of fixed shape."""
from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import nms


def nms_mask(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Which boxes greedy suppression keeps, in each of several sets.

    It is an operator of its own so that ONNX gets one NonMaxSuppression node for all sets: torchvision's takes one
    set, and how many indices it returns depends on the data.

    Args:
        boxes (Tensor): `(B, M, 4)` float32, x1 y1 x2 y2; `B` sets.
        scores (Tensor): `(B, M)` float32; a box that scores 0 is none.
        iou_threshold (float): a box is dropped if its IoU with a kept one is above this.

    Returns:
        Tensor: `(B, M)` float32, 1 for a box that is kept and 0 for any other.
    """
    return torch.ops.mmunorm.nms_mask(boxes, scores, iou_threshold)


# By a library, as torch.library.custom_op is not in torch 2.1.
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

