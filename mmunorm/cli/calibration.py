"""What `tools/convert_norms.py` asks of a config: training pictures, and the metrics of a model that is at hand."""
from __future__ import annotations

import torch
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.registry import EVALUATOR, init_default_scope
from mmengine.runner import Runner
from torch import nn
from tqdm import tqdm

from ..engine.repeatable import seed_everything
from ..errors import PreflightError
from .pictures import name_pictures


def training_batches(cfg: Config, num_samples: int) -> list[dict]:
    """The first shuffled batches of the training data, as the loader of `cfg` makes them, of so many samples or more.

    All of the data if it has fewer. The same each time.

    Raises:
        PreflightError: the config has no training data, or the data set is empty.
    """
    if cfg.get('train_dataloader') is None:
        raise PreflightError(f'{cfg.filename} has no train_dataloader: statistics are taken from training pictures.')
    loader = _loader(cfg, 'train')
    batches, samples = [], 0
    with tqdm(total=num_samples, desc='reading', unit='picture') as bar:
        for batch in loader:
            batches.append(batch)
            samples += len(batch['inputs'])
            bar.update(len(batch['inputs']))
            if samples >= num_samples:
                return batches
    if not batches:
        raise PreflightError(f'the training data of {cfg.filename} are empty: no statistics can be taken.')
    return batches


@torch.no_grad()
def test_metrics(cfg: Config, model: nn.Module, title: str) -> dict[str, float]:
    """The test metrics of a model on the test data of `cfg`; `title` stands beside the progress bar."""
    loader = _loader(cfg, 'test')
    evaluator = _evaluator(cfg)
    evaluator.dataset_meta = loader.dataset.metainfo
    for batch in tqdm(loader, desc=title, unit='batch'):
        evaluator.process(data_samples=model.test_step(batch), data_batch=batch)
    return evaluator.evaluate(len(loader.dataset))


def _loader(cfg: Config, split: str):
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    seed_everything([0])
    loader = Runner.build_dataloader({**cfg[f'{split}_dataloader'], 'persistent_workers': False}, seed=0)
    name_pictures(loader.dataset)
    return loader


def _evaluator(cfg: Config) -> Evaluator:
    evaluator = cfg.test_evaluator
    if isinstance(evaluator, dict) and 'metrics' in evaluator:
        return EVALUATOR.build(evaluator, default_args=dict(type='Evaluator'))
    return Evaluator(evaluator)
