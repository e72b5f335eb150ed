"""A picture for people of what a COCO-format data set holds."""
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pycocotools import mask as coco_mask
from scipy.ndimage import binary_dilation

COLOURS = ((255, 80, 80), (80, 255, 80), (90, 160, 255), (255, 230, 60), (255, 90, 255),
           (60, 240, 240))


def draw_contact_sheet(annotation_file, image_folder, out_file, columns=4, rows=3, tile=256):
    """Draw the first images of a COCO-format set with boxes, class names and mask outlines.

    Args:
        annotation_file (str | Path): instances with RLE masks.
        image_folder (str | Path): where the images lie.
        out_file (str | Path): the picture to write.
        columns, rows (int): how many images there are side by side and one below the other.
        tile (int): side of one image on the sheet in pixels.
    """
    coco = json.loads(Path(annotation_file).read_text(encoding='utf-8'))
    names = {category['id']: category['name'] for category in coco['categories']}
    sheet = Image.new('RGB', (columns * tile, rows * tile))
    for index, info in enumerate(coco['images'][:columns * rows]):
        annotations = [ann for ann in coco['annotations'] if ann['image_id'] == info['id']]
        with Image.open(Path(image_folder) / info['file_name']) as image:
            picture = _annotate(image.convert('RGB'), annotations, names, tile)
        sheet.paste(picture, (index % columns * tile, index // columns * tile))
    sheet.save(out_file)


def _annotate(image, annotations, names, tile):
    scale = tile / image.width
    pixels = np.array(image.resize((tile, tile), Image.Resampling.BICUBIC))
    coloured = [(ann, COLOURS[index % len(COLOURS)]) for index, ann in enumerate(annotations)]
    for ann, colour in coloured:
        mask = Image.fromarray(coco_mask.decode(ann['segmentation']) * 255)
        mask = np.asarray(mask.resize((tile, tile), Image.Resampling.NEAREST)) > 0
        pixels[binary_dilation(mask, iterations=2) & ~mask] = colour
    picture = Image.fromarray(pixels)
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(size=14)
    for ann, colour in coloured:
        left, top, width, height = (value * scale for value in ann['bbox'])
        draw.rectangle((left, top, left + width - 1, top + height - 1), outline=colour)
        corner = (left, max(0, top - 18))
        draw.rectangle(draw.textbbox(corner, names[ann['category_id']], font=font), fill=(0, 0, 0))
        draw.text(corner, names[ann['category_id']], font=font, fill=colour)
    return picture
