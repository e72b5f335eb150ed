"""Checks COCO annotation files for errors that mmdet ignores or raises late, and fills in missing keys."""
from __future__ import annotations

import json
import math
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import mmcv
import numpy as np
from PIL import Image
from pycocotools import mask as rle
from pycocotools.coco import COCO

from ..utils import PreflightError, error_text

_LISTS = ('images', 'annotations', 'categories')
_EXIF_ORIENTATION = 274
_SAMPLE = 200  # image files whose size is compared with the annotated one


@dataclass(frozen=True)
class Use:
    """What a data set or metric requires of an annotation file.

    Attributes:
        classes (tuple[str, ...]): the classes of the config; empty if unknown.
        folder (str, optional): the folder of the images; None for a metric.
        masks (bool): whether each object needs a `segmentation`.
        objects (bool): whether the file must have objects.
        empty (bool): whether images without objects are loaded.
        loading (tuple[str, str]): `color_type` and `imdecode_backend`, with which images are loaded.
    """
    classes: tuple[str, ...] = ()
    folder: str | None = None
    masks: bool = False
    objects: bool = True
    empty: bool = True
    loading: tuple[str, str] = ('color', 'cv2')


def check_annotations(path: str, uses: Iterable[Use]) -> list[str]:
    """Reads a COCO file and checks it for all of its uses; returns warnings."""
    try:
        content = _read(path)
        for use in uses:
            _check_categories(content['categories'], use.classes)
        _check_images(content['images'])
        warnings = _check_objects(content, any(use.masks for use in uses), any(use.objects for use in uses))
        for use in uses:
            if use.folder is not None:
                _check_files(content, use)
    except _Problem as problem:
        raise PreflightError(f'the annotation file {path} cannot be used: {problem}.') from None
    return [f'{path}: {warning}.' for warning in warnings]


def check_evaluator(evaluator: str, paths: Sequence[str]) -> None:
    """Checks that an evaluator's COCO file has the images of the data sets' files, with the same ids and file names.

    The objects of others would count as missed, or be compared with those of another image.
    """
    its, theirs = ({image['id']: os.path.basename(image['file_name']) for path in group
                    for image in _read(path)['images']} for group in ([evaluator], paths))
    if differing := [key for key in its | theirs if its.get(key) != theirs.get(key)]:
        key = differing[0]
        raise PreflightError(
            f'the evaluator reads {evaluator}, and the data set {", ".join(paths)}: {len(differing)} of '
            f'{len(its | theirs)} images differ, such as id {key!r}, which is {its.get(key)} and {theirs.get(key)}; '
            "set the evaluator's ann_file to that of the data set.")


@contextmanager
def completed_annotations() -> Iterator[None]:
    """A context in which annotation files that are read get missing keys that pycocotools or mmdet require.

    A missing `iscrowd` is 0, a missing `area` that of the box. If an `id` is missing, occurs twice, or is not positive,
    which the evaluation would treat as "no match", all annotations are renumbered; nothing refers to them.
    """
    index = COCO.createIndex

    def complete_and_index(self):
        annotations = self.dataset.get('annotations', ())
        ids = {annotation.get('id') for annotation in annotations}
        renumber = len(ids) < len(annotations) or not all(isinstance(key, int) and key > 0 for key in ids)
        for number, annotation in enumerate(annotations, 1):
            if 'bbox' in annotation:  # absent in panoptic files
                annotation.setdefault('iscrowd', 0)
                annotation.setdefault('area', annotation['bbox'][2] * annotation['bbox'][3])
                if renumber:
                    annotation['id'] = number
        return index(self)

    with mock.patch.object(COCO, 'createIndex', complete_and_index):
        yield


class _Problem(Exception):
    """A file cannot be used; the message is the reason."""


def _read(path: str) -> dict:
    with open(path) as file:  # as pycocotools opens it, which refuses a byte order mark
        try:
            content = json.load(file)
        except ValueError as error:
            raise _Problem(error_text(error)) from None
    if not isinstance(content, dict):
        raise _Problem('it is no JSON object')
    if missing := [key for key in _LISTS if not isinstance(content.get(key), list)]:
        raise _Problem(f'it has no list of {missing[0]}')
    if not all(isinstance(entry, dict) for key in _LISTS for entry in content[key]):
        raise _Problem('its images, annotations and categories must be objects')
    for list_name, name, keys in (('categories', 'category', ('id', 'name')),
                                  ('images', 'image', ('id', 'file_name', 'width', 'height'))):
        for entry in content[list_name]:
            if missing := [key for key in keys if key not in entry]:
                raise _Problem(f'the {name} {entry.get("file_name", entry)} has no {missing[0]}')
        ids = Counter(entry['id'] for entry in content[list_name])
        if len(ids) < len(content[list_name]):
            raise _Problem(f'two {list_name} have the id {ids.most_common(1)[0][0]!r}')
    return content


def _check_categories(categories: list[dict], classes: tuple[str, ...]) -> None:
    """mmdet numbers labels by the order of the file's categories, without those that are not classes of the config."""
    names = [category['name'] for category in categories]
    found = [name for name in names if name in classes]
    if not classes or found == list(classes):
        return
    if not found:
        raise _Problem(f'its categories are {shorten(names)}, and metainfo.classes of the config has none of them: '
                       f'{shorten(classes)}')
    if lacking := [name for name in classes if name not in names]:
        raise _Problem(f'its categories lack {shorten(lacking)} of metainfo.classes, and the labels of the others '
                       'would shift; add them to `categories`: a category may have no objects')
    if len(found) > len(classes):
        raise _Problem(f'its categories name {next(name for name in found if found.count(name) > 1)!r} twice')
    first = next(i for i, (name, expected) in enumerate(zip(found, classes, strict=True)) if name != expected)
    raise _Problem(
        f'its categories are in the order {shorten(found[first:])}, and metainfo.classes of the config in the order '
        f'{shorten(classes[first:])}, from label {first} on; mmdet numbers labels in the order of the file: write both '
        'in one order')


def shorten(names: Sequence[str]) -> str:
    """The first five of the names, for a message."""
    return ', '.join(map(repr, names[:5])) + (', ...' if len(names) > 5 else '')


def _check_images(images: list[dict]) -> None:
    if unnamed := [image['id'] for image in images if not isinstance(image['file_name'], str)]:
        raise _Problem(f'the file_name of image {unnamed[0]} is no text')
    wrong = [image for image in images
             if not _are_numbers([image['width'], image['height']]) or min(image['width'], image['height']) <= 0]
    if wrong:
        width, height = wrong[0]['width'], wrong[0]['height']
        raise _Problem(f'{len(wrong)} of {len(images)} images have no valid size, such as {wrong[0]["file_name"]} with '
                       f'width {width!r} and height {height!r}; mmdet would leave their objects out')


def _check_objects(content: dict, masks: bool, needs_objects: bool) -> list[str]:
    """Checks each object, then all together; returns warnings."""
    sizes = {image['id']: (image['width'], image['height']) for image in content['images']}
    categories = {category['id'] for category in content['categories']}
    objects, rows = [], array('d')
    for annotation in content['annotations']:
        for key in ('image_id', 'category_id'):
            if key not in annotation:
                raise _Problem(f'{_id_of(annotation)} has no {key}')
        for key in ('ignore', 'iscrowd'):
            if annotation.get(key, 0) not in (0, 1):
                raise _Problem(f'{_id_of(annotation)} has {key} {annotation[key]!r}, which must be the number 0 or 1')
        if annotation.get('ignore'):
            continue
        box, size = annotation.get('bbox'), sizes.get(annotation['image_id'], (math.nan, math.nan))
        if not (isinstance(box, list) and len(box) == 4 and _are_numbers(box)):
            raise _Problem(f'{_id_of(annotation)} has the box {box}, and a box is four finite numbers')
        if not _are_numbers([annotation.get('area', 1)]):
            raise _Problem(f'{_id_of(annotation)} has the area {annotation["area"]!r}, which must be a number')
        if masks and not annotation.get('segmentation'):
            raise _Problem(f'{_id_of(annotation)} has no segmentation, and the config asks for masks: use annotations '
                           'with masks, or a model without a mask head')
        has_bounds = masks and annotation['image_id'] in sizes
        bounds = _bounds(annotation, size) if has_bounds else (*box[:2], math.inf, math.inf)
        objects.append(annotation)
        rows.extend((*box, *size, *bounds, annotation.get('area', 1), annotation.get('iscrowd', 0),
                     annotation['category_id'] in categories))
    warnings = _check_all_objects(objects, np.array(rows).reshape(-1, 13).T, needs_objects)
    if any('area' not in annotation for annotation in objects):
        warnings.append('objects have no `area`; it is computed from their boxes')
    return warnings


def _check_all_objects(objects: list[dict], columns: np.ndarray, needs_objects: bool) -> list[str]:
    """Raises a _Problem if most objects are useless; returns warnings."""
    x, y, w, h, width, height, x1, y1, x2, y2, area, crowd, known = columns
    listed = width > 0
    number, ignored, reasons = listed.sum(), np.zeros(len(objects), dtype=bool), []
    for reason, mask in (  # in mmdet's order; coordinates may be rounded to pixels
            ('of an image that the file does not list', ~listed),
            ('of a category that the file does not list', known == 0),
            ('outside of their image', (x + w <= 0) | (x >= width) | (y + h <= 0) | (y >= height)),
            ('smaller than a pixel', (w < 1) | (h < 1)),
            ('without area', area <= 0),
            ('without a polygon of three points', np.isnan(x1)),
            ('with a segmentation that is empty or outside of their box',
             (np.minimum(x2, x + w + 1) <= np.maximum(x1, x - 1)) | (np.minimum(x2, width) <= np.maximum(x1, 0))
             | (np.minimum(y2, y + h + 1) <= np.maximum(y1, y - 1)) | (np.minimum(y2, height) <= np.maximum(y1, 0)))):
        if (mask := mask & ~ignored).any():
            reasons.append(f'{mask.sum()} {reason}, the first is {_id_of(objects[mask.argmax()])}')
        ignored |= mask
    left_out = f'{ignored.sum()} of {len(objects)} objects are left out: {"; ".join(reasons)}'
    over_x, over_y = width + 0.05 * width + 1, height + 0.05 * height + 1
    leaving = ((x + w > over_x) | (y + h > over_y) | (x < width - over_x) | (y < height - over_y)).sum()
    if number and (columns[:4].max(0)[listed] <= 1).all():
        raise _Problem("its boxes are normalized: no number is above 1, and COCO's are in pixels")
    if 4 * leaving > number and ((x >= 0) & (y >= 0) & (x < w) & (y < h) & (w <= width) & (h <= height))[listed].all():
        raise _Problem('its boxes seem to be x1, y1, x2, y2: read as x, y, width, height, as in COCO, '
                       f'{leaving} of {number} leave their image')
    if needs_objects and not objects:
        raise _Problem('it has no objects')
    # Objects of images that are not listed are harmless: the file may be of a part of the images.
    if needs_objects and (not number or 2 * (ignored & listed).sum() > number):
        raise _Problem(left_out)
    if needs_objects and crowd[~ignored].all():
        raise _Problem('all of its objects are crowds (iscrowd=1), which are neither trained on nor evaluated')
    warnings = [left_out] if reasons else []
    if 2 * leaving > number:
        warnings.append(f'{leaving} of {number} boxes leave their image by more than 5 %; they must be x, y, width, '
                        'height in pixels of the annotated size')
    return warnings


def _id_of(annotation: dict) -> str:
    return f'annotation {annotation["id"]}' if 'id' in annotation else f'an annotation of {annotation.get("image_id")}'


def _bounds(annotation: dict, size: tuple[float, float]) -> Sequence[float]:
    """The bounds x1, y1, x2, y2 of a segmentation; NaN if it has no polygon that mmdet draws."""
    parts, (width, height) = annotation['segmentation'], size
    if isinstance(parts, dict):
        counts = parts.get('counts')
        fits = parts.get('size') == [height, width] and (isinstance(counts, str) or (
            isinstance(counts, list) and _are_numbers(counts) and min(counts) >= 0 and sum(counts) == width * height))
        if not fits:
            raise _Problem(f'{_id_of(annotation)} has an RLE with size {parts.get("size")} and counts '
                           f'{str(counts)[:40]}; its image has height and width {[height, width]}, and the counts must '
                           'be compressed text, or a list of runs that are as many pixels')
        x, y, w, h = rle.toBbox(parts if isinstance(counts, str) else rle.frPyObjects(parts, int(height), int(width)))
        return x, y, x + w, y + h
    try:
        right = math.isfinite(sum(map(sum, parts))) and not any(len(polygon) % 2 for polygon in parts)
    except TypeError:
        right = False
    if not right:  # a NaN would end the process in pycocotools
        raise _Problem(f'{_id_of(annotation)} has the segmentation {str(parts)[:40]}; it must be an RLE or a list of '
                       'polygons [x1, y1, x2, y2, ...] of finite numbers')
    drawn = [polygon for polygon in parts if len(polygon) >= 6]
    if not drawn:
        return [math.nan] * 4
    points = drawn[0] if len(drawn) == 1 else sum(drawn, [])
    xs, ys = points[::2], points[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def _check_files(content: dict, use: Use) -> None:
    """Looks for each image, and compares the annotated sizes of some with those that they are loaded with."""
    used = {annotation['image_id'] for annotation in content['annotations']}
    images = {os.path.join(use.folder, image['file_name']): image for image in content['images']
              if use.empty or image['id'] in used}
    folders = set(map(os.path.dirname, images))
    there = {os.path.join(folder, name) for folder in folders if os.path.isdir(folder or '.')
             for name in os.listdir(folder or '.')}  # 100,000 names in a tenth of a second
    if missing := [path for path in images if path not in there and not os.path.exists(path)]:
        raise _Problem(f'{len(missing)} of {len(images)} images are missing, such as {missing[0]}')
    for path, image in list(images.items())[::max(1, len(images) // _SAMPLE)]:
        try:
            with Image.open(path) as opened:
                size, turned = opened.size, opened.getexif().get(_EXIF_ORIENTATION, 1) > 4
            if turned:  # OpenCV and Pillow turn it, other loaders and `color_ignore_orientation` do not
                size = mmcv.imfrombytes(Path(path).read_bytes(), use.loading[0], backend=use.loading[1]).shape[1::-1]
        except (OSError, AttributeError):  # loading reports damaged images
            continue
        annotated = image['width'], image['height']
        if size != annotated:
            advice = ('; its EXIF orientation turns it: annotate it as it is shown, or load images with '
                      "color_type='color_ignore_orientation'" if turned and size == annotated[::-1] else '')
            raise _Problem(f'{path} has {size[0]} x {size[1]} pixels{" as it is loaded" * turned}, and is annotated '
                           f'with width {annotated[0]} and height {annotated[1]}{advice}')


def _are_numbers(values: list) -> bool:
    return {int, float}.issuperset(map(type, values)) and math.isfinite(sum(values))
