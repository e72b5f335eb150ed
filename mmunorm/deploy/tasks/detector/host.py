"""A detector whose networks run elsewhere, and its detections in the original image."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..base import Call
from .postprocess import detect


@torch.no_grad()
def run_parts(meta: dict, call: Call, images: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Runs the parts of :func:`.graph.parts_of`, all but `features` on any number of regions."""
    def run(part: str, regions: Tensor, found: Tensor) -> dict[str, Tensor]:
        """Runs a part on the regions that are found alone; the outputs of the others are 0."""
        outs = _channels_first(call(part, regions[found].permute(0, 2, 3, 1).contiguous().numpy()))
        return {name: out.new_zeros(len(found), *out.shape[1:]).index_put((found.nonzero()[:, 0], ), out)
                for name, out in outs.items()}

    features = _channels_first(call('features', padded(meta, images, sizes)))
    outs = [detect(meta['detector'], run, {name: values[index:index + 1] for name, values in features.items()},
                   torch.from_numpy(sizes[index:index + 1])) for index in range(len(images))]
    return [torch.cat(values).numpy() for values in zip(*outs, strict=True)]


def padded(meta: dict, images: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Channels-last images, padded with the pixel that normalizes to mmdet's `pad_value`."""
    batch = np.empty((len(images), *images.shape[2:], 3), np.float32)
    batch[:] = meta['detector']['pad']
    for target, image, (height, width) in zip(batch, images, sizes.astype(int), strict=True):
        target[:height, :width] = image[:, :height, :width].transpose(1, 2, 0)
    return batch


def _channels_first(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array).movedim(-1, 1) for name, array in arrays.items()}


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
    top, bottom = max(int(np.floor(y1)) - 1, 0), min(int(np.ceil(y2)) + 1, height)
    left, right = max(int(np.floor(x1)) - 1, 0), min(int(np.ceil(x2)) + 1, width)
    pasted = np.zeros((height, width), bool)
    if top >= bottom or left >= right or x2 <= x1 or y2 <= y1:
        return pasted
    down = _weights(np.arange(top, bottom), y1, y2, mask.shape[0])
    across = _weights(np.arange(left, right), x1, x2, mask.shape[1])
    pasted[top:bottom, left:right] = down @ mask @ across.T >= threshold
    return pasted


def _weights(pixels: np.ndarray, start: float, end: float, bins: int) -> np.ndarray:
    """The linear interpolation weights of bins between `start` and `end`, `(pixels, bins)`; zero outside."""
    position = (pixels + 0.5 - start) / (end - start) * bins - 0.5
    return np.clip(1 - np.abs(position[:, None] - np.arange(bins)), 0, None).astype(np.float32)
