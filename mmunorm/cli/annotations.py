"""Checks COCO annotation files for errors that mmdet ignores or raises late, and fills in missing keys."""
from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from PIL import Image
from pycocotools.coco import COCO

from ..utils import PreflightError, error_text

_LISTS = ('images', 'annotations', 'categories')
_EXIF_ORIENTATION = 274
_REASONS = 'smaller than a pixel, outside of their image, or of an image or category that the file does not list'
_SAMPLE = 20  # image files whose size is compared with the annotated one


@dataclass(frozen=True)
class Use:
    """What a data set or metric requires of an annotation file.

    Attributes:
        classes (tuple[str, ...]): the classes of the config; empty if unknown.
        folder (str, optional): the folder of the images; None for a metric.
        masks (bool): whether each object needs a `segmentation`.
        objects (bool): whether the file must have objects.
    """
    classes: tuple[str, ...] = ()
    folder: str | None = None
    masks: bool = False
    objects: bool = True


def check_annotations(path: str, uses: Sequence[Use]) -> list[str]:
    """Reads a COCO file and checks it for all of its uses; returns warnings.

    Raises:
        PreflightError: mmdet cannot use the file, or would use it wrongly. The message names the first wrong entry.
    """
    try:
        content = _read(path)
        for use in uses:
            _check_categories(content['categories'], use.classes)
        _check_images(content['images'])
        left_out = _check_objects(content, any(use.masks for use in uses))
        if any(use.objects for use in uses) and len(left_out) == len(content['annotations']):
            raise _Problem(f'all of its objects are {_REASONS}' if left_out else 'it has no objects')
        for folder in {use.folder for use in uses} - {None}:
            _check_sizes(content['images'], folder)
    except _Problem as problem:
        raise PreflightError(f'the annotation file {path} cannot be used: {problem}.') from None
    warnings = []
    if left_out:
        warnings.append(f'{path}: {len(left_out)} of {len(content["annotations"])} objects are left out, because they '
                        f'are {_REASONS}; the first is {_named(left_out[0])}.')
    if any('area' not in each for each in content['annotations']):
        warnings.append(f'{path}: objects have no `area`; it is computed from their boxes.')
    return warnings


@contextmanager
def completed_annotations() -> Iterator[None]:
    """A context in which annotation files that are read get missing keys that pycocotools or mmdet require.

    A missing `iscrowd` is 0, a missing `area` that of the box. If an `id` is missing, occurs twice, or is not positive,
    which the evaluation would treat as "no match", all annotations are renumbered; nothing refers to them.
    """
    index = COCO.createIndex

    def complete_and_index(self):
        annotations = self.dataset.get('annotations', ())
        ids = {each.get('id') for each in annotations}
        renumber = len(ids) < len(annotations) or not all(isinstance(each, int) and each > 0 for each in ids)
        for number, each in enumerate(annotations, 1):
            if 'bbox' in each:  # absent in panoptic files
                each.setdefault('iscrowd', 0)
                each.setdefault('area', each['bbox'][2] * each['bbox'][3])
                if renumber:
                    each['id'] = number
        return index(self)

    with mock.patch.object(COCO, 'createIndex', complete_and_index):
        yield


class _Problem(Exception):
    """A file cannot be used; the message is the reason."""


def _read(path: str) -> dict:
    with open(path, 'rb') as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1024))
        if not file.read().rstrip().endswith(b'}'):  # fails fast: parsing may take half a minute
            raise _Problem('it is cut off, or is no JSON object')
        file.seek(0)
        try:
            content = json.load(file)
        except ValueError as error:
            raise _Problem(error_text(error)) from None
    if missing := [key for key in _LISTS if not isinstance(content.get(key), list)]:
        raise _Problem(f'it has no list of {missing[0]}')
    if not all(isinstance(entry, dict) for key in _LISTS for entry in content[key]):
        raise _Problem('its images, annotations and categories must be objects')
    return content


def _check_categories(categories: list[dict], classes: tuple[str, ...]) -> None:
    """mmdet numbers labels by the order of the file's categories, without those that are not classes of the config."""
    for category in categories:
        if missing := [key for key in ('id', 'name') if key not in category]:
            raise _Problem(f'the category {category} has no {missing[0]}')
    names = [category['name'] for category in categories]
    found = [name for name in names if name in classes]
    if not classes or found == list(classes):
        return
    if not found:
        raise _Problem(f'its categories are {_few(names)}, and metainfo.classes of the config has none of them: '
                       f'{_few(classes)}')
    if lacking := [name for name in classes if name not in names]:
        raise _Problem(f'its categories lack {_few(lacking)} of metainfo.classes, and the labels of the others would '
                       'shift; add them to `categories`: a category may have no objects')
    if len(found) > len(classes):
        raise _Problem(f'its categories name {next(name for name in found if found.count(name) > 1)!r} twice')
    first = next(i for i, (name, expected) in enumerate(zip(found, classes, strict=True)) if name != expected)
    raise _Problem(
        f'its categories are in the order {_few(found[first:])}, and metainfo.classes of the config in the order '
        f'{_few(classes[first:])}, from label {first} on; mmdet numbers labels in the order of the file: write both in '
        'one order')


def _few(names: Sequence[str]) -> str:
    return ', '.join(map(repr, names[:5])) + (', ...' if len(names) > 5 else '')


def _check_images(images: list[dict]) -> None:
    ids = set()
    for image in images:
        if missing := [key for key in ('id', 'file_name', 'width', 'height') if key not in image]:
            raise _Problem(f'the image {image.get("file_name", image.get("id"))} has no {missing[0]}')
        if image['id'] in ids:
            raise _Problem(f'two images have the id {image["id"]}')
        ids.add(image['id'])
    wrong = [image for image in images for side in (image['width'], image['height'])
             if not (_is_number(side) and side > 0)]
    if wrong:
        width, height = wrong[0]['width'], wrong[0]['height']
        raise _Problem(f'{len({image["id"] for image in wrong})} of {len(images)} images have no valid size, such as '
                       f'{wrong[0]["file_name"]} with width {width!r} and height {height!r}; mmdet would leave their '
                       'objects out')


def _check_objects(content: dict, masks: bool) -> list[dict]:
    """Checks each object; returns those that mmdet ignores."""
    images = {image['id']: image for image in content['images']}
    categories = {category['id'] for category in content['categories']}
    left_out = []
    for each in content['annotations']:
        if missing := [key for key in ('image_id', 'category_id') if key not in each]:
            raise _Problem(f'{_named(each)} has no {missing[0]}')
        for key in ('ignore', 'iscrowd'):
            if each.get(key, 0) not in (0, 1):
                raise _Problem(f'{_named(each)} has {key} {each[key]!r}, which must be the number 0 or 1')
        if each.get('ignore'):
            continue
        box = each.get('bbox')
        if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
            raise _Problem(f'{_named(each)} has the box {box}, and a box is four finite numbers')
        if not _is_number(each.get('area', 0)):
            raise _Problem(f'{_named(each)} has the area {each["area"]!r}, which must be a number')
        if masks and not each.get('segmentation'):
            raise _Problem(f'{_named(each)} has no segmentation, and the config asks for masks: use annotations with '
                           'masks, or a model without a mask head')
        image = images.get(each['image_id'])
        if image is None or each['category_id'] not in categories or _is_left_out(each, image):
            left_out.append(each)
    return left_out


def _named(annotation: dict) -> str:
    return f'annotation {annotation["id"]}' if 'id' in annotation else f'an annotation of {annotation.get("image_id")}'


def _is_left_out(annotation: dict, image: dict) -> bool:
    """As mmdet's CocoDataset decides."""
    x, y, width, height = annotation['bbox']
    return (min(x + width, image['width']) <= max(x, 0) or min(y + height, image['height']) <= max(y, 0)
            or width < 1 or height < 1 or annotation.get('area', 1) <= 0)


def _check_sizes(images: list[dict], folder: str) -> None:
    """Compares the annotated sizes of some images with those of their files."""
    for image in images[::max(1, len(images) // _SAMPLE)]:
        path = os.path.join(folder, image['file_name'])
        try:
            with Image.open(path) as opened:
                size, orientation = opened.size, opened.getexif().get(_EXIF_ORIENTATION, 1)
        except OSError:  # loading reports missing or damaged images
            continue
        annotated = image['width'], image['height']
        if orientation <= 4 and size != annotated:  # from 5 on, loading rotates the image
            raise _Problem(f'{path} has {size[0]} x {size[1]} pixels, and is annotated with width {annotated[0]} and '
                           f'height {annotated[1]}')


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
