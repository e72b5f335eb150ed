"""Checks of a run's data for what OpenMMLab does not report, or only in the middle of a run: classes, class folders,
COCO files, images."""
from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import signature
from itertools import chain
from pathlib import Path

import mmcv
import numpy as np
from mmengine.config import Config
from mmengine.fileio import list_dir_or_file, list_from_file
from mmpretrain.datasets import CustomDataset
from mmpretrain.registry import DATASETS
from pycocotools import mask as rle

from ..config.walk import walk
from ..engine.calibration import open_images
from ..utils import PreflightError, error_text, one_line, warn

# Parts of a model that have as many classes as its data. A proposal or a semantic head has others.
_HEADS = {'model', 'head', 'bbox_head', 'mask_head', 'mask_iou_head', 'point_head', 'segm_head', 'panoptic_head',
          'panoptic_fusion_head'}


def check_data(cfg: Config, splits: Sequence[str]) -> None:
    """Checks the data sets and evaluators of `splits`, some of 'train', 'val' and 'test'; each may be missing.

    A PreflightError if they cannot be used, or would be used in another way than the config says.
    """
    try:
        check_classes(cfg, splits)
        _check_coco(cfg, splits)
    except OSError as error:
        raise PreflightError(f'the data set is not there: {one_line(error)} (working directory {os.getcwd()}).'
                             ) from error
    for dataset in [dataset for split in splits for dataset in leaf_datasets(cfg, split)]:
        if hasattr(class_of(dataset), 'check_model'):
            class_of(dataset).check_model(dataset, cfg.model)


# Data sets of a config


def class_name(described) -> str:
    """The class name, without a scope, of an object or of its config, whose `type` is text or the class."""
    kind = described.get('type') if isinstance(described, dict) else type(described)
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition('.')[-1]


def class_of(dataset: dict) -> type:
    """The registered class of a data set; `object` if there is none."""
    name = class_name(dataset)
    cls = DATASETS.get(name) or DATASETS.get(f'mmpretrain.{name}') or DATASETS.get(f'mmdet.{name}')
    return cls if isinstance(cls, type) else object


def leaf_datasets(cfg: Config, split: str) -> list[dict]:
    """The data sets of a split, those inside RepeatDataset (`dataset`), ConcatDataset (`datasets`) and others."""
    def leaves(dataset: dict) -> list[dict]:
        inner = [*(dataset.get('datasets') or []), *filter(None, [dataset.get('dataset')])]
        return sum(map(leaves, inner), []) if inner else [dataset]

    dataset = (cfg.get(f'{split}_dataloader') or {}).get('dataset')
    return leaves(dataset) if isinstance(dataset, dict) else []


def classes_of(dataset: dict) -> tuple[str, ...]:
    """The names of a data set's classes in the config, else those of its type; empty if neither has any."""
    meta = {**getattr(class_of(dataset), 'METAINFO', {}), **_configured(dataset)}
    names = meta.get('thing_classes') or meta.get('classes') or ()
    if isinstance(names, str):
        if not os.path.isfile(names):
            raise PreflightError(f'{class_name(dataset)}: classes={names!r} is neither a list of names nor a file of '
                                 f'them; a single class is written ({names!r}, ), with a comma.')
        names = list_from_file(names)
    return tuple(names)


def _configured(dataset: dict) -> dict:
    """The classes of a data set in the config; mmpretrain takes `classes` and `metainfo`."""
    return {**{key: dataset[key] for key in ('classes', ) if dataset.get(key)}, **(dataset.get('metainfo') or {})}


def _is_local(path: str, part: dict) -> bool:
    return bool(path) and '://' not in path and not part.get('backend_args')


def _shorten(names: Sequence[str]) -> str:
    return ', '.join(map(repr, names[:5])) + (', ...' if len(names) > 5 else '')


# Classes, and their folders


def check_classes(cfg: Config, splits: Sequence[str]) -> None:
    """Compares the class names of all data sets, those of their folders, and their number with the model's heads."""
    if {'language_model', 'tracker'} & {*cfg.get('model', {})}:
        return  # the classes are texts, or only some of those of MOTChallenge
    first: dict[str, tuple[str, tuple[str, ...]]] = {}  # where names were seen first, and the names
    for split in splits:
        for dataset in leaf_datasets(cfg, split):
            names, (root, folders) = classes_of(dataset), _class_folders(dataset)
            source = f'the classes of {split}_dataloader'
            if folders:
                _check_folders(root, folders, names, source, 'classes' in _configured(dataset))
                _check_files(root, folders, dataset, may_be_empty=split != 'train')
            for kind, what, found in (('classes', source, names), ('folders', f'the folders of {root}', folders)):
                if found:
                    _check_same(what, found, *first.setdefault(kind, (what, found)))
    source, names = first.get('classes') or first.get('folders') or ('', ())
    for key, head in walk(cfg.get('model', {}), 'model') if names else ():
        if not isinstance(head, dict) or head.get('class_agnostic') or (
                re.sub(r'[.\d]+$', '', key).rpartition('.')[2] not in _HEADS):
            continue
        option = 'num_things_classes' if 'num_things_classes' in head else 'num_classes'
        if isinstance(head.get(option), int) and head[option] != len(names):
            raise PreflightError(f'{key}.{option} is {head[option]}, and {source} are {len(names)}: {_shorten(names)}; '
                                 f'set {key}.{option}={len(names)}.')


def _class_folders(dataset: dict) -> tuple[str, tuple[str, ...]]:
    """The folder of a data set whose classes are its folders, and their names in mmpretrain's order, else nothing."""
    root, split, prefix = dataset.get('data_root') or '', dataset.get('split') or '', dataset.get('data_prefix') or ''
    listed = dataset.get('ann_file') or split and os.path.isfile(os.path.join(root, 'meta', f'{split}.txt'))
    folder = os.path.join(root, (prefix.get('img_path') if isinstance(prefix, dict) else prefix) or split)
    reads_folders = getattr(class_of(dataset), 'load_data_list', None) is CustomDataset.load_data_list and not listed
    if not reads_folders or not dataset.get('with_label', True) or split == 'test' or not _is_local(folder, dataset):
        return '', ()
    folder = os.path.normpath(folder)
    return folder, tuple(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()))


def _check_folders(root: str, folders: tuple[str, ...], names: tuple[str, ...], source: str, configured: bool) -> None:
    """Compares class folders with the names of the classes."""
    if strange := [folder for folder in folders if folder.startswith(('.', '__'))]:  # .ipynb_checkpoints, __MACOSX
        raise PreflightError(f'{root} has the folder {strange[0]}, which counts as a class: remove it.')
    # Folders may have numbers, as ImageNet's, and the classes names.
    numbers = [int(folder.lstrip('n')) for folder in folders if re.fullmatch(r'n?\d+', folder)]
    numbered = len(numbers) == len(folders) and len(names) in (0, len(folders)) and set(folders).isdisjoint(names)
    if numbered and numbers != sorted(numbers):
        problem = f'{root}: folders are sorted as text, {_shorten(folders)}: write the numbers with as many digits.'
        if names:
            raise PreflightError(problem)
        warn(problem)
    elif configured and not numbered:
        _check_same(f'the folders of {root}', folders, source, names)


def _check_same(what: str, names: tuple[str, ...], other: str, others: tuple[str, ...]) -> None:
    """Raises a PreflightError if the names differ, or their order."""
    if names != others:
        label = len(os.path.commonprefix([names, others]))
        raise PreflightError(
            f'{what} are {_shorten(names[label:]) or "no more"} from label {label} on, and {other} '
            f'{_shorten(others[label:]) or "no more"}; labels are numbered in the order of names, and folders are '
            'sorted as text: the names and their order must be the same.')


def _check_files(root: str, folders: tuple[str, ...], dataset: dict, may_be_empty: bool) -> None:
    """Opens the images of class folders, and counts the files that mmpretrain passes over because of their suffixes."""
    default = signature(CustomDataset).parameters['extensions'].default
    extensions = tuple(dataset.get('extensions') or default)
    images, passed_over = [], []
    for folder in folders:
        files = [os.path.join(root, folder, file)
                 for file in list_dir_or_file(os.path.join(root, folder), list_dir=False, recursive=True)]
        read = [file for file in files if file.lower().endswith(extensions)]
        if not read and (files or not may_be_empty):
            raise PreflightError(f'the class folder {os.path.join(root, folder)} has no image that mmpretrain reads: '
                                 f'{len(files)} files, and the suffixes {" ".join(extensions)}.')
        images += read
        passed_over += sorted({*files} - {*read})
    if passed_over:
        warn(f'{root}: {len(passed_over)} of {len(images) + len(passed_over)} files are passed over, such as '
             f'{passed_over[0]}; mmpretrain reads {" ".join(extensions)}: convert them, or set `extensions` of the '
             'data set.')
    open_images(images, root)


# COCO files


def _check_coco(cfg: Config, splits: Sequence[str]) -> None:
    """Checks the COCO files of data sets and evaluators, and the images of the data sets."""
    content_of = cache(lambda path: json.loads(Path(path).read_text()))  # refuses a byte order mark, as pycocotools
    checked = []
    for split in splits:
        evaluator = cfg.get(f'{split}_evaluator')
        metrics = [metric for metric in (evaluator if isinstance(evaluator, (list, tuple)) else [evaluator])
                   if isinstance(metric, dict) and class_name(metric) == 'CocoMetric']
        needs_masks = any('segm' in metric.get('metric', '') for metric in metrics)
        needs_objects = split == 'train' or any(not metric.get('format_only') for metric in metrics)
        datasets = [*filter(_is_coco, leaf_datasets(cfg, split))]
        paths, classes = [*map(_annotation_file, datasets)], ()
        for path, dataset in zip(paths, datasets, strict=True):
            classes, steps = classes_of(dataset), [*walk(dataset.get('pipeline') or [])]
            masks = needs_masks or any(key.endswith('with_mask') and value for key, value in steps)
            if path and (dataset, masks, needs_objects) not in checked:  # those of val and test are often the same
                checked.append((dataset, masks, needs_objects))
                with _errors_of(path):
                    check_annotations(path, content_of(path), classes, masks, needs_objects)
                    _check_images(path, content_of(path), dataset, steps)
        for metric in metrics:  # which take the classes of the data set
            path = _annotation_file(metric)
            if not path or path in paths:
                continue
            with _errors_of(path):
                check_annotations(path, content_of(path), classes, needs_masks, needs_objects)
                partly = any(dataset.get('indices') is not None for dataset in datasets)
                if not paths or not all(paths) or partly or metric.get('format_only'):
                    continue
                # The objects of other images would count as missed, or be compared with those of another image.
                its, theirs = ({image['id']: os.path.basename(image['file_name']) for file in files
                                for image in content_of(file)['images']} for files in ([path], paths))
                if its != theirs:
                    raise PreflightError(f'the evaluator reads {path}, and the data set {", ".join(paths)}, which has '
                                         "other images: set the evaluator's ann_file to that of the data set.")


def _is_coco(dataset: dict) -> bool:
    """Whether a data set is mmdet's CocoDataset, or a class that reads annotations as that does."""
    reader = getattr(class_of(dataset), 'load_data_list', None)
    return getattr(reader, '__qualname__', '') == 'CocoDataset.load_data_list'


def _annotation_file(part: dict) -> str:
    """The path of the annotation file of a data set or a metric; '' if it has none on this machine."""
    path = os.path.join(part.get('data_root') or '', part.get('ann_file') or '')
    return os.path.normpath(path) if part.get('ann_file') and _is_local(path, part) else ''


@contextmanager
def _errors_of(path: str) -> Iterator[None]:
    """A context for reading a file; errors that pycocotools would raise become a PreflightError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PreflightError(f'the annotation file {path} cannot be used: {error_text(error)}.') from error


def check_annotations(path: str, content: dict, classes: tuple[str, ...], masks: bool, needs_objects: bool) -> None:
    """Checks the content of a COCO file. A PreflightError if it cannot be used, or with `needs_objects` most of them.

    `masks` is whether each object needs a `segmentation`.
    """
    names = [category['name'] for category in content['categories']]
    # mmdet numbers labels by the order of the file's categories, without those that are no class.
    _check_same(f'the classes among the categories of {path} ({_shorten(names)})', tuple(
        name for name in names if name in classes), 'metainfo.classes of the config', classes)
    for kind in ('categories', 'images', 'annotations'):  # of which pycocotools keeps one of an id
        ids = Counter(entry['id'] for entry in content[kind])
        if len(ids) < len(content[kind]):
            raise PreflightError(f'{path}: two {kind} have the id {ids.most_common(1)[0][0]!r}.')
    sizes = {image['id']: (image['width'], image['height']) for image in content['images']}
    categories = {category['id'] for category in content['categories']}
    objects = [annotation for annotation in content['annotations'] if not annotation.get('ignore')]

    def numbers(one: dict) -> Sequence[float]:
        box, size = one['bbox'], sizes.get(one['image_id'], (math.nan, math.nan))
        if len(box) != 4 or not math.isfinite(sum(box) + one['area']):
            raise ValueError(f'annotation {one["id"]} has the box {box}, area {one["area"]}; a box is four finite '
                             'numbers, and an area is one')
        bounds = _bounds(one, *size) if masks and one['image_id'] in sizes else (0, 0, 0, 0)
        return *box, *size, *bounds, one['area'], one['category_id'] in categories

    columns = np.fromiter(chain.from_iterable(map(numbers, objects)), float).reshape(len(objects), 12).T
    x, y, w, h, width, height, x1, y1, x2, y2, area, known = columns
    listed = width > 0
    reasons = {
        'of an image that the file does not list': ~listed,
        'of a category that the file does not list': known == 0,
        'outside of their image, smaller than a pixel, or without area': listed & ~(
            (x + w > 0) & (x < width) & (y + h > 0) & (y < height) & (w >= 1) & (h >= 1) & (area > 0)),
        # Coordinates may be rounded to pixels.
        'with a segmentation that mmdet cannot use, or outside of their box': masks & listed & ~(
            (np.minimum(np.minimum(x2, x + w + 1), width) > np.maximum(np.maximum(x1, x - 1), 0))
            & (np.minimum(np.minimum(y2, y + h + 1), height) > np.maximum(np.maximum(y1, y - 1), 0)))}
    left_out = np.logical_or.reduce([*reasons.values()])
    text = (f'{path}: {left_out.sum()} of {len(objects)} objects are left out: ' + '; '.join(
        f'{mask.sum()} {reason}, such as annotation {objects[mask.argmax()]["id"]}'
        for reason, mask in reasons.items() if mask.any()) + '.')
    leaving = ((x + w > 1.05 * width + 1) | (y + h > 1.05 * height + 1) | (x < -0.05 * width - 1)
               | (y < -0.05 * height - 1)).sum()
    number = listed.sum()
    if number and (columns[:4].max(0)[listed] <= 1).all():
        raise PreflightError(f"{path}: its boxes are normalized: no number is above 1, and COCO's are in pixels.")
    if 4 * leaving > number and ((x >= 0) & (y >= 0) & (x < w) & (y < h) & (w <= width) & (h <= height))[listed].all():
        raise PreflightError(f'{path}: its boxes seem to be x1, y1, x2, y2: read as x, y, width, height, as in COCO, '
                             f'{leaving} of {number} leave their image.')
    if needs_objects and not objects:
        raise PreflightError(f'{path} has no objects.')
    # Objects of images that are not listed are harmless: the file may be of a part of the images.
    if needs_objects and (not number or 2 * (left_out & listed).sum() > number):
        raise PreflightError(text)
    if needs_objects and all(one.get('iscrowd') for one, is_out in zip(objects, left_out, strict=True) if not is_out):
        raise PreflightError(f'{path}: all of its objects are crowds, which are neither trained on nor evaluated.')
    if left_out.any():
        warn(text)
    if 2 * leaving > number:
        warn(f'{path}: {leaving} of {number} boxes leave their image by more than 5 %; they must be x, y, width, '
             'height in pixels of the annotated size.')


def _bounds(annotation: dict, width: float, height: float) -> Sequence[float]:
    """The bounds x1, y1, x2, y2 of a segmentation; NaN if it has no polygon that mmdet draws."""
    parts = annotation.get('segmentation')
    if not parts:
        raise ValueError(f'annotation {annotation["id"]} has no segmentation, and the config asks for masks')
    if isinstance(parts, dict):
        counts = parts['counts']
        fits = isinstance(counts, str) or min(counts) >= 0 and sum(counts) == width * height
        if parts.get('size') != [height, width] or not fits:
            raise ValueError(f'annotation {annotation["id"]} has an RLE of another size than its image, {width} x '
                             f'{height}')
        x, y, w, h = rle.toBbox(parts if isinstance(counts, str) else rle.frPyObjects(parts, int(height), int(width)))
        return x, y, x + w, y + h
    if not math.isfinite(sum(map(sum, parts))):  # pycocotools would take memory until the process is killed
        raise ValueError(f'annotation {annotation["id"]} has a segmentation with NaN or infinity')
    if any(len(polygon) % 2 for polygon in parts):
        return [math.nan] * 4
    points = sum((polygon for polygon in parts if len(polygon) >= 6), [])
    return (min(points[::2]), min(points[1::2]), max(points[::2]), max(points[1::2])) if points else [math.nan] * 4


def _check_images(path: str, content: dict, dataset: dict, steps: Sequence[tuple[str, object]]) -> None:
    """Opens the images that are loaded, and compares their sizes with the annotated ones, which mmdet does not."""
    folder = os.path.join(dataset.get('data_root') or '', (dataset.get('data_prefix') or {}).get('img') or '')
    loader = next((step for _, step in steps if class_name(step) == 'LoadImageFromFile'), {})
    # Other loaders read images from elsewhere, and `indices` only some of them.
    if not _is_local(folder, loader) or not (loader or len(steps) == 1) or dataset.get('indices') is not None:
        return
    loads_empty = dataset.get('test_mode') or not (dataset.get('filter_cfg') or {}).get('filter_empty_gt')
    used = {annotation['image_id'] for annotation in content['annotations']}
    images = {os.path.join(folder, image['file_name']): (image['width'], image['height'])
              for image in content['images'] if loads_empty or image['id'] in used}
    for file, (size, turned) in open_images([*images], path).items():
        if turned:  # OpenCV and Pillow turn it, other loaders and `color_ignore_orientation` do not
            size = mmcv.imread(file, loader.get('color_type', 'color'), backend=loader.get('imdecode_backend', 'cv2')
                               ).shape[1::-1]
        if size != images[file]:
            how = ", turned by EXIF unless it is loaded with color_type='color_ignore_orientation'" * turned
            raise PreflightError(f'{path}: {file} has {size[0]} x {size[1]} pixels{how}, and is annotated with width '
                                 f'{images[file][0]} and height {images[file][1]}.')
