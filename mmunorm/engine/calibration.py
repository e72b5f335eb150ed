"""Training and test images of a config, and the test metrics of a model."""
from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import EVALUATOR, init_default_scope
from mmengine.runner import Runner, set_random_seed
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from ..utils import IMAGE_SUFFIXES, PreflightError, is_first_process


def training_batches(cfg: Config, num_samples: int) -> list[dict]:
    """Shuffled batches of at least `num_samples` training images, or of all; the same batches each time.

    They go through the test pipeline, without augmentation.
    """
    if cfg.get('train_dataloader') is None:
        raise PreflightError(f'{cfg.filename} has no train_dataloader: statistics are computed from training images.')
    cfg = copy.deepcopy(cfg)
    if cfg.get('test_dataloader') is not None:
        cfg.train_dataloader.dataset = _with_pipeline(cfg.train_dataloader.dataset,
                                                      cfg.test_dataloader.dataset.pipeline)
    batches, samples = [], 0
    with tqdm(total=num_samples, desc='reading', unit='image', disable=None) as bar:
        for batch in _loader(cfg, 'train'):
            batches.append(batch)
            samples += len(batch['inputs'])
            bar.update(len(batch['inputs']))
            if samples >= num_samples:
                break
    return batches


def samples_of(batches: Sequence[dict]) -> list[dict]:
    """The single images of batches, with their data samples."""
    return [dict(zip(batch, values, strict=True)) for batch in batches for values in zip(*batch.values(), strict=True)]


_OPENED = 100_000  # image files of a data set that are opened, at most
_ENDS = {'PNG': b'IEND', 'JPEG': b'\xff\xd9'}
_ORIENTATION = 274


def open_images(paths: Sequence[str | os.PathLike], what: str) -> dict[str | os.PathLike, tuple[tuple[int, int], bool]]:
    """The size `(width, height)` of image files, and whether their EXIF orientation turns them by a quarter.

    The first process of a run opens them for all, at most 100,000, evenly spread. It reads the header and the end, and
    all of a PNG or JPEG that does not end as one. Those that are larger than Pillow opens are left out. A
    PreflightError about `what` if some are missing, empty, truncated, or no images.
    """
    paths = paths[::-(-len(paths) // _OPENED) or 1] if is_first_process() else []
    found, problems = {}, []

    def open_image(path: str | os.PathLike) -> None:
        try:
            with Image.open(path) as image, open(path, 'rb') as file:
                file.seek(max(0, os.path.getsize(path) - 64))
                if _ENDS.get(image.format, b'') not in file.read():
                    image.load()
                found[path] = image.size, image.getexif().get(_ORIENTATION, 1) > 4
        except FileNotFoundError:
            problems.append(f'{path}: no such file')
        except Image.DecompressionBombError:
            pass
        except Exception:  # Pillow's readers may raise anything
            problems.append(f'{path}: it is empty, truncated, or not an image')

    with ThreadPoolExecutor(16) as pool:  # files may be on another machine
        list(tqdm(pool.map(open_image, paths), total=len(paths), desc='checking', unit='image', disable=None))
    if problems:
        raise PreflightError(f'{what}: {len(problems)} of {len(paths)} images cannot be used, such as {min(problems)}.')
    return found


class FolderImages(Sequence):
    """The images of a folder, in the format of `samples_of`; an image is read when it is indexed.

    They go through the pipeline of testing, without annotations.
    """

    def __init__(self, cfg: Config, folder: str):
        self.paths = sorted(path for path in Path(folder).rglob('*') if path.suffix.lower() in IMAGE_SUFFIXES)
        if not self.paths:
            raise PreflightError(f'--images {folder}: ' + (
                f'there is no image (looked for {", ".join(sorted(IMAGE_SUFFIXES))}).' if Path(folder).is_dir() else
                'must be a folder of images.'))
        open_images(self.paths, f'--images {folder}')
        init_default_scope(cfg.get('default_scope', 'mmengine'))
        self.pipeline = Compose([step for step in cfg.test_dataloader.dataset.pipeline
                                 if 'Annotations' not in step['type']])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict:
        return self.pipeline(dict(img_path=str(self.paths[index]), img_id=index))

    def batches(self, num_samples: int, batch_size: int) -> list[dict]:
        """Batches of so many images, or of all, spread evenly over the folder."""
        spread = torch.linspace(0, len(self) - 1, min(num_samples, len(self))).long()
        return [pseudo_collate([self[i] for i in part.tolist()]) for part in spread.split(batch_size)]


def training_images(cfg: Config, number: int) -> list[Tensor]:
    """At most `number` training images, uint8 `(3, h, w)`, without augmentation."""
    return [image for batch in training_batches(cfg, number) for image in batch['inputs']][:number]


def test_images(cfg: Config, number: int) -> list[Tensor]:
    """The first `number` test images, uint8 `(3, h, w)`, repeated if there are too few."""
    images = list(islice(chain.from_iterable(batch['inputs'] for batch in _loader(cfg, 'test')), number))
    return (images * number)[:number]


@torch.no_grad()
def test_metrics(cfg: Config, model: nn.Module, title: str) -> dict[str, float]:
    """The test metrics of a model on the test data of `cfg`; `title` is that of the progress bar."""
    loader = _loader(cfg, 'test')
    classes = loader.dataset.metainfo.get('classes')
    if classes and getattr(model, 'is_detector', True) is False and len(model.classes) != len(classes):
        raise PreflightError(f'the file has {len(model.classes)} classes, and the data set has {len(classes)}.')
    evaluator = cfg.test_evaluator
    if not isinstance(evaluator, dict) or 'metrics' not in evaluator:
        evaluator = dict(metrics=evaluator)
    evaluator = EVALUATOR.build(evaluator, default_args=dict(type='Evaluator'))
    evaluator.dataset_meta = loader.dataset.metainfo
    for batch in tqdm(loader, desc=title, unit='batch', disable=None):
        evaluator.process(data_samples=model.test_step(batch), data_batch=batch)
    return evaluator.evaluate(len(loader.dataset))


def _with_pipeline(dataset: dict, pipeline: list) -> dict:
    """The config of a data set, or of a wrapper of data sets, with another pipeline for single images."""
    if 'dataset' in dataset:
        inner = _with_pipeline(dataset['dataset'], pipeline)
        return inner if 'pipeline' in dataset else {**dataset, 'dataset': inner}  # the first: it mixes images
    if 'datasets' in dataset:
        return {**dataset, 'datasets': [_with_pipeline(inner, pipeline) for inner in dataset['datasets']]}
    return {**dataset, 'pipeline': pipeline}


def _loader(cfg: Config, split: str):
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    set_random_seed(0)
    return Runner.build_dataloader({**cfg[f'{split}_dataloader'], 'persistent_workers': False}, seed=0)
