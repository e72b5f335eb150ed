"""Non-maximum suppression of many sets of boxes at once, with an output of fixed shape."""
from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import nms


def nms_mask(boxes: Tensor, scores: Tensor, iou_threshold: float, score_threshold: float) -> Tensor:
    """Which boxes greedy suppression keeps, in each of several sets.

    It is an operator of its own so that ONNX gets one NonMaxSuppression node for all sets: torchvision's takes one
    set, and how many indices it returns depends on the data.

    Args:
        boxes (Tensor): `(B, M, 4)` float32, x1 y1 x2 y2; `B` sets.
        scores (Tensor): `(B, M)` float32.
        iou_threshold (float): a box is dropped if its IoU with a kept one is above this.
        score_threshold (float): boxes that score no more than this are dropped first.

    Returns:
        Tensor: `(B, M)` float32, 1 for a box that is kept and 0 for any other.
    """
    return torch.ops.mmunorm.nms_mask(boxes, scores, iou_threshold, score_threshold)


# By a library, as torch.library.custom_op is not in torch 2.1.
_OPERATORS = torch.library.Library('mmunorm', 'FRAGMENT')
_OPERATORS.define('nms_mask(Tensor boxes, Tensor scores, float iou_threshold, float score_threshold) -> Tensor')


@torch.library.impl(_OPERATORS, 'nms_mask', 'CompositeExplicitAutograd')
def _nms_mask(boxes: Tensor, scores: Tensor, iou_threshold: float, score_threshold: float) -> Tensor:
    mask = torch.zeros_like(scores)
    for kept, own_boxes, own_scores in zip(mask, boxes, scores, strict=True):
        candidates = (own_scores > score_threshold).nonzero().squeeze(1)
        kept[candidates[nms(own_boxes[candidates], own_scores[candidates], iou_threshold)]] = 1
    return mask


@torch.library.impl(_OPERATORS, 'nms_mask', 'Meta')
def _shape_of_mask(boxes: Tensor, scores: Tensor, iou_threshold: float, score_threshold: float) -> Tensor:
    return torch.empty_like(scores)


def onnx_translations() -> dict:
    """How `torch.onnx.export` writes :func:`nms_mask`, for its `custom_translation_table`."""
    from onnxscript import opset18 as op

    def to_onnx(boxes, scores, iou_threshold: float, score_threshold: float):
        size = op.Shape(scores)
        most = op.Slice(size, op.Constant(value_ints=[1]), op.Constant(value_ints=[2]))
        selected = op.NonMaxSuppression(
            boxes, op.Unsqueeze(scores, op.Constant(value_ints=[1])), most,
            op.Constant(value_float=iou_threshold), op.Constant(value_float=score_threshold))
        # Rows of (set, class, box). As many as there happen to be, and so they become a mask.
        places = op.Gather(selected, op.Constant(value_ints=[0, 2]), axis=1)
        number = op.Slice(op.Shape(selected), op.Constant(value_ints=[0]), op.Constant(value_ints=[1]))
        zeros = op.Expand(op.Constant(value_float=0.), size)
        return op.ScatterND(zeros, places, op.Expand(op.Constant(value_float=1.), number))

    return {torch.ops.mmunorm.nms_mask.default: to_onnx}
