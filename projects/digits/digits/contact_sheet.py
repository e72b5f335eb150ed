"""Draws a preview of a data set in COCO format."""
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from pycocotools.coco import COCO
from torchvision.io import ImageReadMode, read_image
from torchvision.transforms.functional import resize
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks, make_grid, save_image

COLUMNS, ROWS = 4, 3
TILE = 256  # side of one image on the sheet in pixels
COLOURS = ('#ff5050', '#50ff50', '#5aa0ff', '#ffe63c', '#ff5aff', '#3cf0f0')


def draw_contact_sheet(annotation_file, image_folder, out_file):
    """Draws the first images of a COCO-format set with boxes, class names and RLE masks."""
    with redirect_stdout(None):  # COCO prints its duration
        coco = COCO(str(annotation_file))
    infos = coco.loadImgs(coco.getImgIds()[:COLUMNS * ROWS])
    tiles = [_annotate(read_image(str(Path(image_folder) / info['file_name']), ImageReadMode.RGB),
                       coco.imgToAnns[info['id']], coco) for info in infos]
    tiles += [torch.zeros_like(tiles[0])] * (COLUMNS * ROWS - len(tiles))
    save_image(make_grid(tiles, nrow=COLUMNS, padding=0) / 255, out_file)


def _annotate(image, annotations, coco):
    scale = TILE / image.shape[-1]
    image = resize(image, [TILE, TILE], antialias=True)
    if not annotations:
        return image
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(annotations))]
    masks = torch.from_numpy(np.stack([coco.annToMask(annotation) for annotation in annotations]))
    masks = torch.nn.functional.interpolate(masks[None], (TILE, TILE))[0].bool()
    image = draw_segmentation_masks(image, masks, alpha=0.35, colors=colours)
    boxes = torch.tensor([annotation['bbox'] for annotation in annotations]) * scale
    boxes[:, 2:] += boxes[:, :2]
    names = [coco.cats[annotation['category_id']]['name'] for annotation in annotations]
    return draw_bounding_boxes(image, boxes.clamp(max=TILE - 1), names, colours)
