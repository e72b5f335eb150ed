"""Checks of a run's data for errors that OpenMMLab does not report: classes, class folders, COCO files, images.

Labels are numbered in the order of names, boxes may have another form, objects that mmdet cannot use are left out, and
damaged images end a run in the middle of an epoch.
"""
from __future__ import annotations

import inspect
import json
import math
import os
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mmcv
import numpy as np
from mmengine.config import Config
from mmengine.fileio import list_dir_or_file, list_from_file
from mmpretrain.datasets import CustomDataset
from mmpretrain.registry import DATASETS
from pycocotools import mask as rle
from tqdm import tqdm

from ..config.walk import walk
from ..engine.calibration import read_header
from ..utils import PreflightError, error_text, is_first_process, one_line, warn

# Parts of a model that have as many classes as its data. A proposal or a semantic head has others.
_HEADS = {'model', 'head', 'bbox_head', 'mask_head', 'mask_iou_head', 'point_head', 'segm_head', 'panoptic_head',
          'panoptic_fusion_head'}
_HEADERS = 100_000  # image files of a data set that are opened, evenly spread over it


def check_data(cfg: Config, splits: Sequence[str]) -> None:
    """Checks the data sets and evaluators of `splits`, some of 'train', 'val' and 'test'; each may be missing.

    A PreflightError if they cannot be used, or would be used in another way than the config says.
    """
    try:
        check_classes(cfg, splits)
        for path, uses in sorted(_annotations(cfg, splits).items()):
            for warning in check_annotations(path, uses):
                warn(warning)
        _check_evaluators(cfg, splits)
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
    def leaves(dataset) -> Iterator[dict]:
        if not isinstance(dataset, dict):
            return
        inner = [*(dataset.get('datasets') or []), *filter(None, [dataset.get('dataset')])]
        if not inner:
            yield dataset
        for wrapped in inner:
            yield from leaves(wrapped)

    return list(leaves((cfg.get(f'{split}_dataloader') or {}).get('dataset')))


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
                _check_files_of_classes(root, folders, dataset, may_be_empty=split != 'train')
            for kind, what, found in (('classes', source, names), ('folders', f'the folders of {root}', folders)):
                if found:
                    _check_same(what, found, *first.setdefault(kind, (what, found)))
    source, names = first.get('classes') or first.get('folders') or ('', ())
    for key, head in _heads(cfg) if names else ():
        option = 'num_things_classes' if 'num_things_classes' in head else 'num_classes'
        if isinstance(head.get(option), int) and head[option] != len(names):
            raise PreflightError(f'{key}.{option} is {head[option]}, and {source} are {len(names)}: {_shorten(names)}; '
                                 f'set {key}.{option}={len(names)}.')


def _heads(cfg: Config) -> Iterator[tuple[str, dict]]:
    """The parts of a model that have as many classes as its data, each after its key."""
    model = cfg.get('model', {})
    for key, part in walk(model, 'model'):
        if isinstance(part, dict) and not part.get('class_agnostic') and (
                re.sub(r'[.\d]+$', '', key).rpartition('.')[2] in _HEADS):
            yield key, part
    if (model.get('train_cfg') or {}).get('augments'):  # it mixes labels as vectors
        yield 'data_preprocessor', cfg.get('data_preprocessor') or {}


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
    if numbered and (label := next((i for i, pair in enumerate(zip(numbers, sorted(numbers), strict=True))
                                    if pair[0] != pair[1]), None)) is not None:
        problem = f'{root}: folders are sorted as text, so that label {label} is the folder {folders[label]!r}'
        if names:
            raise PreflightError(f'{problem} and the class {names[label]!r}; write the numbers with as many digits.')
        warn(f'{problem}.')
    elif configured and not numbered:
        _check_same(f'the folders of {root}', folders, source, names)


def _check_same(what: str, names: tuple[str, ...], other: str, others: tuple[str, ...]) -> None:
    """Raises a PreflightError if the names differ, or their order."""
    if names == others:
        return
    label = next((i for i, pair in enumerate(zip(names, others, strict=False)) if pair[0] != pair[1]),
                 min(len(names), len(others)))
    raise PreflightError(
        f'{what} are {_shorten(names[label:]) or "no more"} from label {label} on, and {other} '
        f'{_shorten(others[label:]) or "no more"}; labels are numbered in the order of names, and folders are sorted '
        'as text: the names and their order must be the same.')


def _check_files_of_classes(root: str, folders: tuple[str, ...], dataset: dict, may_be_empty: bool) -> None:
    """Opens the images of class folders, and counts the files that mmpretrain passes over because of their suffixes."""
    default = inspect.signature(CustomDataset).parameters['extensions'].default
    extensions = tuple(dataset.get('extensions') or default)
    images, passed_over, number = [], Counter(), 0
    for folder in folders:
        files = [os.path.join(root, folder, file)
                 for file in list_dir_or_file(os.path.join(root, folder), list_dir=False, recursive=True)]
        read = [file for file in files if file.lower().endswith(extensions)]
        if not read and (files or not may_be_empty):
            raise PreflightError(f'the class folder {os.path.join(root, folder)} has no image that mmpretrain reads: '
                                 f'{len(files)} files, and the suffixes {" ".join(extensions)}.')
        images += read
        passed_over.update(Path(file).suffix for file in files if not file.lower().endswith(extensions))
        number += len(files)
    if passed_over:
        suffixes = ', '.join(sorted(suffix or 'none' for suffix in passed_over))
        warn(f'{root}: {passed_over.total()} of {number} files are passed over, with the suffix {suffixes}; mmpretrain '
             f'reads {" ".join(extensions)}: convert them, or set `extensions` of the data set.')
    try:
        _read_headers(images)
    except _Problem as problem:
        raise PreflightError(f'{root}: {problem}.') from None


def _read_headers(paths: Sequence[str]) -> list[tuple[str, tuple[int, int] | None, bool]]:
    """The path, size and rotation of image files, as :func:`read_header`; the first process reads them for all."""
    paths = paths[::math.ceil(len(paths) / _HEADERS) or 1] if is_first_process() else []
    problems = []

    def read(path: str) -> tuple[str, tuple[int, int] | None, bool]:
        try:
            return path, *read_header(path)
        except OSError as error:
            problems.append(one_line(error) if error.filename else f'{path}: {one_line(error)}')
            return path, None, False

    with ThreadPoolExecutor(16) as pool:  # files may be on another machine
        found = [*tqdm(pool.map(read, paths), total=len(paths), desc='checking', unit='image', disable=None)]
    if problems:
        raise _Problem(f'{len(problems)} of {len(paths)} images cannot be used, such as {min(problems)}')
    return found


# COCO files


class _Problem(Exception):
    """A file cannot be used; the message is the reason."""


@dataclass(frozen=True)
class Use:
    """What a data set or metric requires of an annotation file."""
    classes: tuple[str, ...] = ()  # of the config; empty if unknown
    folder: str | None = None  # of the images; None for a metric
    masks: bool = False  # whether each object needs a `segmentation`
    objects: bool = True  # whether the file must have objects
    empty: bool = True  # whether images without objects are loaded
    loading: tuple[str, str] = ('color', 'cv2')  # `color_type` and `imdecode_backend`


def check_annotations(path: str, uses: Iterable[Use]) -> list[str]:
    """Reads a COCO file and checks it for all of its uses; returns warnings.

    A PreflightError if it cannot be used, or most of its objects.
    """
    uses = [*uses]
    try:
        with open(path) as file:  # as pycocotools opens it, which refuses a byte order mark
            content = json.load(file)
        names = [category['name'] for category in content['categories']]
        for use in uses:  # mmdet numbers labels by the order of the file's categories, without those that are no class
            _check_same(f'the classes among the categories of {path} ({_shorten(names)})', tuple(
                name for name in names if name in use.classes), 'metainfo.classes of the config', use.classes)
        for kind in ('categories', 'images', 'annotations'):  # of which pycocotools keeps one of an id
            ids = Counter(entry['id'] for entry in content[kind])
            if len(ids) < len(content[kind]):
                raise _Problem(f'two {kind} have the id {ids.most_common(1)[0][0]!r}')
        warnings = _check_objects(content, any(use.masks for use in uses), any(use.objects for use in uses))
        for use in uses:
            if use.folder is not None:
                _check_files(content, use)
    except (_Problem, KeyError, TypeError, ValueError, AttributeError) as problem:  # or what pycocotools would raise
        text = problem if isinstance(problem, _Problem) else error_text(problem)
        raise PreflightError(f'the annotation file {path} cannot be used: {text}.') from None
    return [f'{path}: {warning}.' for warning in warnings]


def _check_objects(content: dict, masks: bool, needs_objects: bool) -> list[str]:
    """Checks each object, then all together; returns warnings."""
    sizes = {image['id']: (image['width'], image['height']) for image in content['images']}
    categories = {category['id'] for category in content['categories']}
    objects, rows = [], array('d')
    for annotation in content['annotations']:
        if annotation.get('ignore'):
            continue
        box, size = annotation['bbox'], sizes.get(annotation['image_id'], (math.nan, math.nan))
        if not (isinstance(box, list) and len(box) == 4 and _are_numbers(box)):
            raise _Problem(f'{_id_of(annotation)} has the box {box}, and a box is four finite numbers')
        if masks and not annotation.get('segmentation'):
            raise _Problem(f'{_id_of(annotation)} has no segmentation, and the config asks for masks: use annotations '
                           'with masks, or a model without a mask head')
        has_bounds = masks and annotation['image_id'] in sizes
        bounds = _bounds(annotation, size) if has_bounds else (*box[:2], math.inf, math.inf)
        objects.append(annotation)
        rows.extend((*box, *size, *bounds, annotation['area'], annotation.get('iscrowd', 0),
                     annotation['category_id'] in categories))
    return _check_all_objects(objects, np.array(rows).reshape(-1, 13).T, needs_objects)


def _check_all_objects(objects: list[dict], columns: np.ndarray, needs_objects: bool) -> list[str]:
    """Raises a _Problem if most objects are useless; returns warnings."""
    x, y, w, h, width, height, x1, y1, x2, y2, area, crowd, known = columns
    listed = width > 0
    number, ignored, reasons = listed.sum(), np.zeros(len(objects), dtype=bool), []
    for reason, mask in (  # in mmdet's order; coordinates may be rounded to pixels
            ('of an image that the file does not list, or that has no size', ~listed),
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
    return f'annotation {annotation["id"]}'


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
    """Opens the images that are loaded, and compares their sizes with the annotated ones."""
    used = {annotation['image_id'] for annotation in content['annotations']}
    images = {os.path.join(use.folder, image['file_name']): (image['width'], image['height'])
              for image in content['images'] if use.empty or image['id'] in used}
    for path, size, turned in _read_headers([*images]):
        if turned:  # OpenCV and Pillow turn it, other loaders and `color_ignore_orientation` do not
            size = mmcv.imfrombytes(Path(path).read_bytes(), use.loading[0], backend=use.loading[1]).shape[1::-1]
        if size not in (None, images[path]):
            advice = ('; its EXIF orientation turns it: annotate it as it is shown, or load images with '
                      "color_type='color_ignore_orientation'" if turned and size == images[path][::-1] else '')
            raise _Problem(f'{path} has {size[0]} x {size[1]} pixels{" as it is loaded" * turned}, and is annotated '
                           f'with width {images[path][0]} and height {images[path][1]}{advice}')


def _are_numbers(values: list) -> bool:
    return {int, float}.issuperset(map(type, values)) and math.isfinite(sum(values))


# COCO files of a config


def _annotations(cfg: Config, splits: Sequence[str]) -> dict[str, set[Use]]:
    """The COCO files of a run, each with what its data sets and metrics ask of it."""
    found = defaultdict(set)
    for split in splits:
        classes, metrics = (), _coco_metrics(cfg, split)
        for dataset in filter(_is_coco, leaf_datasets(cfg, split)):
            classes = classes_of(dataset)
            folder = os.path.join(dataset.get('data_root') or '', (dataset.get('data_prefix') or {}).get('img') or '')
            steps = [*walk(dataset.get('pipeline') or [])]
            loader = next((step for _, step in steps if class_name(step) == 'LoadImageFromFile'), {})
            # Other loaders read images from elsewhere, and `indices` only some of them.
            all_read = _is_local(folder, loader) and (loader or len(steps) == 1) and dataset.get('indices') is None
            found[_annotation_file(dataset)].add(Use(
                classes, folder if all_read else None, any(key.endswith('with_mask') and value for key, value in steps),
                objects=split == 'train' or any(not metric.get('format_only') for metric in metrics),
                empty=bool(dataset.get('test_mode')) or not (dataset.get('filter_cfg') or {}).get('filter_empty_gt'),
                loading=(loader.get('color_type', 'color'), loader.get('imdecode_backend', 'cv2'))))
        for metric in metrics:  # which take the classes of the data set
            found[_annotation_file(metric)].add(Use(classes, masks='segm' in metric.get('metric', ''),
                                                    objects=not metric.get('format_only')))
    found.pop('', None)
    return found


def _check_evaluators(cfg: Config, splits: Sequence[str]) -> None:
    """Checks that a metric's COCO file has the images of the data sets' files, with the same ids and file names.

    The objects of others would count as missed, or be compared with those of another image.
    """
    for split in splits:
        datasets = [*filter(_is_coco, leaf_datasets(cfg, split))]
        paths = sorted({_annotation_file(dataset) for dataset in datasets})
        for metric in _coco_metrics(cfg, split):
            path = _annotation_file(metric)
            partly = any(dataset.get('indices') is not None for dataset in datasets)
            if not path or not datasets or not all(paths) or paths == [path] or partly or metric.get('format_only'):
                continue
            its, theirs = ({image['id']: os.path.basename(image['file_name']) for file in group
                            for image in json.loads(Path(file).read_text())['images']} for group in ([path], paths))
            if differing := [key for key in its | theirs if its.get(key) != theirs.get(key)]:
                key = differing[0]
                raise PreflightError(
                    f'the evaluator reads {path}, and the data set {", ".join(paths)}: {len(differing)} of '
                    f'{len(its | theirs)} images differ, such as id {key!r}, which is {its.get(key)} and '
                    f"{theirs.get(key)}; set the evaluator's ann_file to that of the data set.")


def _annotation_file(part: dict) -> str:
    """The path of the annotation file of a data set or a metric; '' if it has none on this machine."""
    path = os.path.join(part.get('data_root') or '', part.get('ann_file') or '')
    return os.path.normpath(path) if part.get('ann_file') and _is_local(path, part) else ''


def _coco_metrics(cfg: Config, split: str) -> list[dict]:
    evaluator = cfg.get(f'{split}_evaluator')
    metrics = evaluator if isinstance(evaluator, (list, tuple)) else [evaluator]
    return [metric for metric in metrics if isinstance(metric, dict) and class_name(metric) == 'CocoMetric']


def _is_coco(dataset: dict) -> bool:
    """Whether a data set is mmdet's CocoDataset, or a class that reads annotations as that does."""
    reader = getattr(class_of(dataset), 'load_data_list', None)
    return class_name(dataset) == 'CocoDataset' or getattr(reader, '__qualname__', '') == 'CocoDataset.load_data_list'
