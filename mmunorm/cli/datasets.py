"""The data sets of a config, their classes, and whether these fit each other and the model."""
from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from mmengine.config import Config
from mmengine.fileio import list_from_file
from mmpretrain.datasets import CustomDataset
from mmpretrain.registry import DATASETS

from ..config.walk import walk
from ..utils import PreflightError, warn
from .annotations import shorten

# Parts of a model that have as many classes as its data. A proposal or a semantic head has others.
_HEADS = {'model', 'head', 'bbox_head', 'mask_head', 'mask_iou_head', 'point_head', 'segm_head', 'panoptic_head',
          'panoptic_fusion_head'}


def class_name(described) -> str:
    """The class name, without a scope, of an object or of its config, whose `type` is text or the class."""
    kind = described.get('type') if isinstance(described, dict) else type(described)
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition('.')[-1]


def class_of(part: dict, registry=DATASETS) -> type:
    """The registered class of a data set or a metric; `object` if there is none."""
    name = class_name(part)
    cls = registry.get(name) or DATASETS.get(f'mmpretrain.{name}') or DATASETS.get(f'mmdet.{name}')
    return cls if isinstance(cls, type) else object


def is_local(path: str, part: dict) -> bool:
    """Whether a path of a data set or a metric is one of this machine's file system."""
    return bool(path) and '://' not in path and not part.get('backend_args')


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


def check_classes(cfg: Config, splits: Sequence[str]) -> None:
    """Compares the class names of all data sets, those of their folders, and their number with the model's heads."""
    if {'language_model', 'tracker'} & {*cfg.get('model', {})}:
        return  # the classes are texts, or only some of those of MOTChallenge
    first: dict[str, tuple[str, tuple[str, ...]]] = {}  # where names were seen first, and the names
    labels = 0
    for split in splits:
        for dataset in leaf_datasets(cfg, split):
            names, (root, folders) = classes_of(dataset), _class_folders(dataset)
            source = f'the classes of {split}_dataloader'
            if folders:
                _check_folders(root, folders, names, source, 'classes' in _configured(dataset))
            for kind, what, found in (('classes', source, names), ('folders', f'the folders of {root}', folders)):
                if found:
                    _check_same(what, found, *first.setdefault(kind, (what, found)))
            labels = max(labels, _number_of_labels(dataset))
            if names and labels > len(names):
                raise PreflightError(f'{dataset["ann_file"]} of {split}_dataloader has the label {labels - 1}, and '
                                     f'{source} are {len(names)}, from label 0 on: {shorten(names)}.')
    source, names = first.get('classes') or first.get('folders') or ('the labels of ann_file', ())
    for key, head in _heads(cfg):
        option = 'num_things_classes' if 'num_things_classes' in head else 'num_classes'
        number, wanted = head.get(option), len(names) or labels
        if isinstance(number, int) and (number < wanted or names and number > wanted):
            raise PreflightError(f'{key}.{option} is {number}, and {source} are {wanted}'
                                 f'{names and f": {shorten(names)}" or ""}; set {key}.{option}={wanted}.')


def _heads(cfg: Config) -> Iterator[tuple[str, dict]]:
    """The parts of a model that have as many classes as its data, each after its key."""
    model = cfg.get('model', {})
    for key, part in walk(model, 'model'):
        if isinstance(part, dict) and not part.get('class_agnostic') and (
                re.sub(r'[.\d]+$', '', key).rpartition('.')[2] in _HEADS):
            yield key, part
    if (model.get('train_cfg') or {}).get('augments'):  # it mixes labels as vectors
        yield 'data_preprocessor', cfg.get('data_preprocessor') or {}


def _reads_folders_or_lists(dataset: dict) -> bool:
    reads = getattr(class_of(dataset), 'load_data_list', None) is CustomDataset.load_data_list
    return reads and dataset.get('with_label', True) and dataset.get('split') != 'test'


def _class_folders(dataset: dict) -> tuple[str, tuple[str, ...]]:
    """The folder of a data set whose classes are its folders, and their names in mmpretrain's order, else nothing."""
    root, split, prefix = dataset.get('data_root') or '', dataset.get('split') or '', dataset.get('data_prefix') or ''
    listed = dataset.get('ann_file') or split and os.path.isfile(os.path.join(root, 'meta', f'{split}.txt'))
    folder = os.path.join(root, (prefix.get('img_path') if isinstance(prefix, dict) else prefix) or split)
    if listed or not _reads_folders_or_lists(dataset) or not is_local(folder, dataset) or not os.path.isdir(folder):
        return '', ()
    return os.path.normpath(folder), tuple(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()))


def _number_of_labels(dataset: dict) -> int:
    """The highest label of a data set's list of images, plus 1; 0 if it has none."""
    path = os.path.join(dataset.get('data_root') or '', dataset.get('ann_file') or '')
    if not (dataset.get('ann_file') and _reads_folders_or_lists(dataset) and is_local(path, dataset)):
        return 0
    labels = {line.strip().rpartition(' ')[2] for line in list_from_file(path)}
    if wrong := [label for label in labels if not label.isdecimal()]:
        raise PreflightError(f'{path}: each line must be the path of an image and the number of its class, not '
                             f'{wrong[0]!r}.')
    return max(map(int, labels), default=-1) + 1


def _check_folders(root: str, folders: tuple[str, ...], names: tuple[str, ...], source: str, configured: bool) -> None:
    """Compares class folders with the names of the classes."""
    if hidden := [folder for folder in folders if folder.startswith('.')]:
        raise PreflightError(f'{root} has the hidden folder {hidden[0]}, which counts as a class: remove it.')
    if names and not configured and len(names) != len(folders):
        raise PreflightError(f'{root} has {len(folders)} class folders, and {source}, those of its type, are '
                             f'{len(names)}: name the folders in metainfo.classes of the data set.')
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
    if lacking := [name for name in others if name not in names]:
        problem = f'{what} lack {shorten(lacking)} of {other}'
    elif more := [name for name in names if name not in others]:
        problem = f'{what} have {shorten(more)}, and {other} have not'
    else:
        label = next((i for i, pair in enumerate(zip(names, others, strict=False)) if pair[0] != pair[1]), len(others))
        problem = f'{what} are {shorten(names[label:])} from label {label} on, and {other} {shorten(others[label:])}'
    raise PreflightError(f'{problem}; labels are numbered in the order of names, and folders are sorted as text: the '
                         'names and their order must be the same.')
