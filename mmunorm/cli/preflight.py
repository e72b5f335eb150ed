"""Quick checks before a run: whether all files that it reads exist."""
from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import METRICS
from mmpretrain.datasets import CIFAR10, ImageNet
from mmpretrain.registry import DATASETS

from ..checkpoints.loading import check_checkpoint, read_checkpoint
from ..config.pretrained import pretrained_path
from ..config.walk import walk
from ..utils import PreflightError, warn
from .annotations import Use, check_annotations, check_evaluator
from .datasets import check_classes, class_name, class_of, classes_of, is_local, leaf_datasets

# How to get the data, by the name of a folder in its path. The first entry that fits counts.
SOURCES = {
    'digits': 'make it with `python projects/digits/tools/make_digits.py`',
    'photographs': 'make it with `python projects/photographs/tools/make_photographs.py`',
    'coco': 'get train2017.zip, val2017.zip and annotations_trainval2017.zip from '
            'https://cocodataset.org/#download and unpack them in {folder}, or link your copy to it',
    'imagenet': 'get ILSVRC2012 from https://image-net.org/download.php and unpack it in {folder}/train and '
                '{folder}/val, with one folder of images for each of the 1000 classes, or link your copy '
                'to {folder}',
    'cifar10': 'get https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz and unpack it in {folder}',
    'cifar100': 'get https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz and unpack it in {folder}',
}


def check_data(cfg: Config, splits: Sequence[str]) -> None:
    """Checks that the data files and folders of a run are there, and that mmdet can use its COCO annotations.

    It looks inside dataset wrappers, and at the files of evaluators. It does not check remote paths, or data sets that
    download themselves: their classes do. `splits` are some of 'train', 'val' and 'test'; a config may lack any of
    their loaders and evaluators.
    """
    parts = [(part, class_of(part, registry)) for split in splits
             for found, registry in ((leaf_datasets, DATASETS), (_metrics, METRICS)) for part in found(cfg, split)]
    problems = {path: (problem, cls) for part, cls in parts for path, problem in _problems(part, cls).items()}
    if problems:
        raise PreflightError(_missing_data_message(problems))
    check_classes(cfg, splits)
    num_classes = (cfg.get('model', {}).get('head') or {}).get('num_classes', math.inf)
    for metric in [metric for split in splits for metric in _metrics(cfg, split)]:
        topk = metric.get('topk') or 1
        if class_name(metric) == 'Accuracy' and max(topk if isinstance(topk, (list, tuple)) else [topk]) > num_classes:
            raise PreflightError(f'the evaluators have topk={topk}, and the model has {num_classes} classes: set '
                                 'val_evaluator.topk and test_evaluator.topk, for example to 1.')
    for path, uses in sorted(_annotations(cfg, splits).items()):
        for warning in check_annotations(path, uses):
            warn(warning)
    _check_evaluators(cfg, splits)
    for part, cls in parts:
        if hasattr(cls, 'check_model'):
            cls.check_model(part, cfg.model)


def check_pretrained(cfg: Config, config_path: str) -> None:
    """Checks that the checkpoints exist that the parts of the model start from, where they are local files.

    Whether one fits, :func:`mmunorm.config.starting.fit_pretrained` finds out.
    """
    for part in [name for name, value in cfg.model.items() if isinstance(value, dict)]:
        without, option = f'model.{part}.init_cfg', f'model.{part}.init_cfg.checkpoint'
        if part == 'backbone':
            without = option = 'pretrained'
        path = pretrained_path(cfg, part)
        if path is None or '://' in path:
            continue
        if os.path.isfile(path):
            read_checkpoint(path)  # mmengine would fail in the middle of building the model
            continue
        if os.path.isdir(path):
            check_checkpoint(path)  # its error explains folders
        # work_dirs/NAME/epoch_300.pth is what training NAME.py leaves.
        folder, name = Path(config_path).parent, f'{Path(path).parent.name}.py'
        makers = [maker for maker in (folder / name, *folder.parent.glob(f'*/{name}')) if maker.is_file()]
        make = f'make it with `python tools/train.py {makers[0]}`, ' if makers else ''
        raise PreflightError(
            f'the {part} weights to start from are missing: no file {path}; {make}name another with '
            f'`--cfg-options {option}=PATH`, or start without any with `--cfg-options {without}=None`.')


def _metrics(cfg: Config, split: str) -> list[dict]:
    evaluator = cfg.get(f'{split}_evaluator')
    metrics = evaluator if isinstance(evaluator, (list, tuple)) else [evaluator]
    return [metric for metric in metrics if isinstance(metric, dict)]


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
            all_read = is_local(folder, loader) and (loader or len(steps) == 1) and dataset.get('indices') is None
            found[_annotation_file(dataset)].add(Use(
                classes, folder if all_read else None, any(key.endswith('with_mask') and value for key, value in steps),
                objects=split == 'train' or any(not metric.get('format_only') for metric in metrics),
                empty=bool(dataset.get('test_mode')) or not (dataset.get('filter_cfg') or {}).get('filter_empty_gt'),
                loading=(loader.get('color_type', 'color'), loader.get('imdecode_backend', 'cv2'))))
        for metric in metrics:  # which take the classes of the data set
            found[_annotation_file(metric)].add(
                Use(classes, masks='segm' in metric.get('metric', ''), objects=not metric.get('format_only')))
    found.pop('', None)
    return found


def _check_evaluators(cfg: Config, splits: Sequence[str]) -> None:
    """Compares the COCO files of metrics with those of their data sets."""
    for split in splits:
        datasets = [*filter(_is_coco, leaf_datasets(cfg, split))]
        paths = sorted({_annotation_file(dataset) for dataset in datasets})
        for metric in _coco_metrics(cfg, split):
            path = _annotation_file(metric)
            partly = any(dataset.get('indices') is not None for dataset in datasets)
            if path and all(paths) and paths != [path] and datasets and not partly and not metric.get('format_only'):
                check_evaluator(path, paths)


def _annotation_file(part: dict) -> str:
    """The path of the annotation file of a data set or a metric; '' if it has none on this machine."""
    path = os.path.join(part.get('data_root') or '', part.get('ann_file') or '')
    return os.path.normpath(path) if part.get('ann_file') and is_local(path, part) else ''


def _coco_metrics(cfg: Config, split: str) -> list[dict]:
    return [metric for metric in _metrics(cfg, split) if class_name(metric) == 'CocoMetric']


def _is_coco(dataset: dict) -> bool:
    """Whether a data set is mmdet's CocoDataset, or a class that reads annotations as that does."""
    reader = getattr(class_of(dataset, DATASETS), 'load_data_list', None)
    return class_name(dataset) == 'CocoDataset' or getattr(reader, '__qualname__', '') == 'CocoDataset.load_data_list'


def _problems(part: dict, cls: type) -> dict[str, str]:
    """What is wrong with the files of a data set or a metric, by path."""
    problems = {}
    for path, is_folder in _expected_paths(part, cls):
        path = os.path.join(part.get('data_root') or '', path)
        exists = os.path.isdir(path) and any(os.scandir(path)) if is_folder else os.path.isfile(path)
        if is_local(path, part) and not exists:
            path = os.path.normpath(path)
            problems[path] = f'no folder {path}, or it is empty' if is_folder else f'no file {path}'
    return problems


def _expected_paths(part: dict, cls: type) -> Iterator[tuple[str, bool]]:
    """Yields each path, relative to `data_root`, and whether it is a folder."""
    if issubclass(cls, CIFAR10):  # which checks the files' MD5 sums
        files = [] if part.get('download') else cls.train_list + cls.test_list
        yield from ((os.path.join(cls.base_folder, name), False) for name, _ in files)
        return
    if hasattr(cls, 'FILES'):
        yield from ((part[name], False) for name in cls.FILES if part.get(name))
        return
    if part.get('ann_file'):
        yield part['ann_file'], False
    prefixes = part.get('data_prefix') or ''
    if 'split' in part:
        if not issubclass(cls, ImageNet):
            return  # the files of a split depend on the class
        prefixes = prefixes or part['split']
    for prefix in prefixes.values() if isinstance(prefixes, dict) else [prefixes]:
        yield prefix or '', True


def _missing_data_message(problems: dict[str, tuple[str, type]]) -> str:
    listed = '; '.join([problem for problem, _ in problems.values()][:3])
    more = f'; and {len(problems) - 3} more' if len(problems) > 3 else ''
    path, (_, cls) = next(iter(problems.items()))
    return (f'the data set is not there: {listed}{more} (working directory {os.getcwd()}): '
            f'{getattr(cls, "how_to_get", lambda path: None)(path) or _how_to_get(path)}.')


def _how_to_get(path: str) -> str:
    folders = Path(path).parts
    for name, source in SOURCES.items():
        if name in folders:
            return source.format(folder=Path(*folders[:folders.index(name) + 1]))
    return 'check data_root and the names of files and folders in the config'
