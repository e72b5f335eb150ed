"""Training and test images of a config, and the test metrics of a model."""
from __future__ import annotations

import copy

import torch
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.registry import EVALUATOR, init_default_scope
from mmengine.runner import Runner
from torch import Tensor, nn
from tqdm import tqdm

from ..utils import PreflightError
from .images import name_images
from .repeatable import seed_everything


def training_batches(cfg: Config, num_samples: int) -> list[dict]:
    """Shuffled batches of at least `num_samples` training images, or of all; the same batches each time.

    They go through the test pipeline, without augmentation.

    Raises:
        PreflightError: the config has no training data, or the data set is empty.
    """
    if cfg.get('train_dataloader') is None:
        raise PreflightError(f'{cfg.filename} has no train_dataloader: statistics are taken from training images.')
    cfg = copy.deepcopy(cfg)
    if cfg.get('test_dataloader') is not None:
        cfg.train_dataloader.dataset = _with_pipeline(cfg.train_dataloader.dataset,
                                                      cfg.test_dataloader.dataset.pipeline)
    try:
        loader = _loader(cfg, 'train')
    except ValueError as error:
        if 'at least one array' not in str(error):  # mmengine's error for a data set without samples
            raise
        raise PreflightError(f'the training data of {cfg.filename} are empty: no statistics can be taken.') from error
    batches, samples = [], 0
    with tqdm(total=num_samples, desc='reading', unit='image', disable=None) as bar:
        for batch in loader:
            batches.append(batch)
            samples += len(batch['inputs'])
            bar.update(len(batch['inputs']))
            if samples >= num_samples:
                break
    return batches


def training_images(cfg: Config, number: int) -> list[Tensor]:
    """At most `number` training images, uint8 `(3, h, w)`, without augmentation."""
    return [image for batch in training_batches(cfg, number) for image in batch['inputs']][:number]


def test_images(cfg: Config, number: int) -> list[Tensor]:
    """The first `number` test images, uint8 `(3, h, w)`, repeated if there are too few."""
    images = []
    for batch in _loader(cfg, 'test'):
        images += batch['inputs']
        if len(images) >= number:
            break
    return (images * number)[:number]


@torch.no_grad()
def test_metrics(cfg: Config, model: nn.Module, title: str) -> dict[str, float]:
    """The test metrics of a model on the test data of `cfg`; `title` is that of the progress bar.

    Raises:
        PreflightError: the model is an exported classifier with another number of classes.
    """
    loader = _loader(cfg, 'test')
    classes = loader.dataset.metainfo.get('classes')
    if classes and getattr(model, 'is_detector', True) is False and len(model.classes) != len(classes):
        raise PreflightError(f'the file tells {len(model.classes)} classes apart, and the data have {len(classes)}.')
    evaluator = cfg.test_evaluator
    if isinstance(evaluator, dict) and 'metrics' in evaluator:
        evaluator = EVALUATOR.build(evaluator, default_args=dict(type='Evaluator'))
    else:
        evaluator = Evaluator(evaluator)
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
        return {**dataset, 'datasets': [_with_pipeline(each, pipeline) for each in dataset['datasets']]}
    return {**dataset, 'pipeline': pipeline}


def _loader(cfg: Config, split: str):
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    seed_everything([0])
    loader = Runner.build_dataloader({**cfg[f'{split}_dataloader'], 'persistent_workers': False}, seed=0)
    name_images(loader.dataset)
    return loader
