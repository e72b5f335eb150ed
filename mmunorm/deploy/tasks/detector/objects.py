"""The objects that a file detects, in the original image."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import grid_sample


@dataclass
class Detections:
    """The objects in one image, in pixels of the original image."""
    boxes: np.ndarray  # `(n, 4)` float32, x1 y1 x2 y2
    scores: np.ndarray  # `(n, )` float32, in descending order
    labels: np.ndarray  # `(n, )` int64, indices of `ExportedModel.classes`
    masks: np.ndarray | None = field(repr=False, default=None)  # `(n, height, width)` bool, if the model has some


def detections(outputs: dict[str, np.ndarray], meta: dict, scale: tuple[float, float], height: int, width: int,
               score_thr: float = 0.) -> Detections:
    """The outputs for one image of `height` and `width`; `scale` is the size of the file's image over its (w, h)."""
    scores = outputs['dets'][:, 4]
    found = (scores > 0) & (scores >= score_thr)
    boxes = outputs['dets'][found, :4] / np.array([*scale, *scale], np.float32)
    masks = None
    if 'masks' in outputs:
        masks = np.zeros((len(boxes), height, width), bool)
        for pasted, mask, box in zip(masks, outputs['masks'][found], boxes, strict=True):
            pasted[:] = paste(mask, box, height, width, meta['mask_threshold'])
    return Detections(boxes, scores[found], outputs['labels'][found].astype(np.int64), masks)


def paste(mask: np.ndarray, box: Sequence[float], height: int, width: int, threshold: float) -> np.ndarray:
    """Pastes a mask into an image, like mmdet's `_do_paste_mask`: `(height, width)` bool.

    `mask` `(h, w)` float32 are probabilities in the area of `box`, x1 y1 x2 y2 in pixels.
    """
    x1, y1, x2, y2 = (float(side) for side in box)
    pasted = np.zeros((height, width), bool)
    top, bottom = max(int(np.floor(y1)) - 1, 0), min(int(np.ceil(y2)) + 1, height)
    left, right = max(int(np.floor(x1)) - 1, 0), min(int(np.ceil(x2)) + 1, width)
    if top < bottom and left < right and x1 < x2 and y1 < y2:
        down = (torch.arange(top, bottom) + 0.5 - y1) / (y2 - y1) * 2 - 1
        across = (torch.arange(left, right) + 0.5 - x1) / (x2 - x1) * 2 - 1
        grid = torch.stack(torch.meshgrid(across, down, indexing='xy'), -1)
        inside = grid_sample(torch.from_numpy(mask)[None, None], grid[None], align_corners=False)[0, 0]
        pasted[top:bottom, left:right] = inside.numpy() >= threshold
    return pasted
