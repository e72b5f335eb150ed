"""Composes cut-out objects on a background, and writes such scenes in COCO format."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask
from tqdm import tqdm

# The share of an object's mask that must remain visible, so that every object in an image can be annotated.
MIN_VISIBLE = 0.6
MAX_BOX_IOU = 0.3
TRIES = 10  # places for an object


@dataclass(frozen=True)
class Cutout:
    """An object in an image.

    Attributes:
        sample: its source, with `label`, its class, and `origin`, a dict for its annotation.
        alpha (numpy.ndarray): `(h, w)` in [0, 1]; its top left corner is at (`top`, `left`).
        pixels (numpy.ndarray): RGB in [0, 255], broadcastable to `(h, w, 3)`.
    """
    sample: Any
    alpha: np.ndarray
    top: int
    left: int
    pixels: np.ndarray

    @property
    def mask(self):
        return self.alpha > 0.5

    @property
    def window(self):
        height, width = self.alpha.shape
        return slice(self.top, self.top + height), slice(self.left, self.left + width)


def compose(background, cutouts):
    """Composes cutouts on a background `(H, W, 3)` in [0, 255], each over the ones before it.

    Returns the image, float32, and the owner of each pixel, int `(H, W)`: -1 for the background, else the index of the
    topmost cutout whose mask has it.
    """
    image = background.astype(np.float32)
    owner = np.full(background.shape[:2], -1)
    for index, cutout in enumerate(cutouts):
        alpha = cutout.alpha[..., None]
        image[cutout.window] = (1 - alpha) * image[cutout.window] + alpha * cutout.pixels
        owner[cutout.window][cutout.mask] = index
    return image, owner


def add_cutout(background, cutouts, draw):
    """Adds one more cutout, on top, in a place where enough of the others stays visible, if there is one.

    `draw()` returns the cutout of an object in a random place.
    """
    _, owner = compose(background, cutouts)
    for _ in range(TRIES):
        cutout = draw()
        if _keeps_visible(cutouts, cutout, owner):
            cutouts.append(cutout)
            return


def _keeps_visible(cutouts, cutout, owner):
    """Whether all ``cutouts`` remain visible with ``cutout`` on top of them."""
    if any(_box_iou(cutout, other) > MAX_BOX_IOU for other in cutouts):
        return False
    owner = owner.copy()
    owner[cutout.window][cutout.mask] = len(cutouts)
    return all((owner == index).sum() >= MIN_VISIBLE * other.mask.sum() for index, other in enumerate(cutouts))


def _box_iou(first, second):
    inner = 1
    for a, b in zip(first.window, second.window, strict=True):
        inner *= max(0, min(a.stop, b.stop) - max(a.start, b.start))
    return inner / (first.alpha.size + second.alpha.size - inner)


def write_scenes(folder: Path, split: str, count: int, draw: Callable, content: dict) -> int:
    """Writes `count` scenes of a split in the COCO format: `FOLDER/SPLIT/*.png`, and their annotations.

    A mask is the visible part of its object (`iscrowd` 0, compressed RLE); box and area are those of the mask.
    `draw(index)` returns the image of a scene, uint8 `(H, W, 3)`, the owners `(H, W)` and the cutouts. `content` has
    `info`, `licenses` and `categories` of the annotation file; the category of a label is label + 1.

    Returns the number of objects.
    """
    (folder / split).mkdir(parents=True)
    (folder / 'annotations').mkdir(exist_ok=True)
    images, annotations = [], []
    for index in tqdm(range(count), f'{split} scenes', mininterval=0.5, disable=None):
        pixels, owner, cutouts = draw(index)
        height, width = owner.shape
        image = dict(id=index + 1, file_name=f'{index + 1:06d}.png', width=width, height=height, license=1)
        save_image(pixels, folder / split / image['file_name'])
        images.append(image)
        for order, cutout in enumerate(cutouts):
            # COCO's evaluation treats annotation id 0 as "no match".
            annotations.append(dict(id=len(annotations) + 1, image_id=image['id'],
                                    **_annotation(owner == order, cutout.sample)))
    text = json.dumps(dict(info=content['info'], licenses=content['licenses'], images=images, annotations=annotations,
                           categories=content['categories']))
    (folder / 'annotations' / f'instances_{split}.json').write_text(text, encoding='utf-8')
    return len(annotations)


def _annotation(mask, sample):
    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    return dict(
        category_id=sample.label + 1, bbox=coco_mask.toBbox(rle).astype(int).tolist(), area=int(coco_mask.area(rle)),
        iscrowd=0, segmentation=dict(size=rle['size'], counts=rle['counts'].decode()), **sample.origin)


def in_8_bits(image):
    """Converts an image in [0, 255] to uint8."""
    return np.rint(image).astype(np.uint8)


def save_image(image, path):
    """Saves an image, uint8 (H, W, 3), as a PNG."""
    # Fast compression halves the total time, and noise hardly compresses.
    Image.fromarray(image).save(path, compress_level=1)
