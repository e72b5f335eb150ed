"""Resuming that reproduces an uninterrupted run."""
from __future__ import annotations

import random
from functools import partial

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import BatchSampler, DataLoader


@HOOKS.register_module()
class RepeatableHook(Hook):
    """Makes every step's random numbers depend only on the seed and the step, so that resuming is exact.

    mmengine seeds a run once: a resumed run and its data workers start with the first random numbers again. This hook
    seeds each training sample by its position in the sampler's order, for any number of workers, and each step by its
    number. A resumed run then ends with the same weights, if the device computes deterministically
    (`randomness=dict(deterministic=True)` on a GPU) and the number of processes is the same.

    Only the generators of `random`, numpy and torch are seeded. An epoch-based loop starts again at the beginning of
    the epoch, where mmengine resumes.

    mmengine saves a checkpoint before it validates. If a run was interrupted during its last validation, nothing is
    left to train when it resumes; the hook then validates it.
    """
    priority = 'VERY_HIGH'

    def before_train(self, runner) -> None:
        self._seed = [runner.seed or 0, get_rank()]
        self._order = None
        self._was_finished = _is_finished(runner)
        dataloader = runner.train_dataloader
        if dataloader.batch_sampler is None or not hasattr(dataloader.batch_sampler, 'sampler'):
            runner.logger.warning(
                f'RepeatableHook cannot seed the samples of a {type(dataloader.batch_sampler).__name__}: '
                'a resumed run will draw other augmentations.')
            return
        self._rebuilds = _has_started(runner.train_loop)
        if self._rebuilds:
            dataloader = runner.train_loop.dataloader = _rebuild_loader(runner)
        self._order = _KeyedSampler(dataloader.batch_sampler.sampler, self._seed)
        dataloader.batch_sampler.sampler = self._order
        if hasattr(dataloader.dataset, '__dict__'):  # a plain list has none, and nothing random
            dataloader.dataset.__getitems__ = partial(_seeded_items, dataloader.dataset)

    def before_train_epoch(self, runner) -> None:
        if self._order is None:
            return
        if not isinstance(runner.train_loop, IterBasedTrainLoop):
            self._order.start(runner.epoch, 0)
            return
        # On resuming, the loop lets a sampler skip if it can. Otherwise it draws samples, which counts the places.
        batches = runner.train_dataloader.batch_sampler
        forwarded = type(batches) is BatchSampler and hasattr(self._order.sampler, 'skip')
        self._order.start(0, runner.iter * batches.batch_size if forwarded else 0)
        if self._rebuilds:
            loop = runner.train_loop
            loop.dataloader_iterator = type(loop.dataloader_iterator)(loop.dataloader)

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        seed_everything([*self._seed, runner.iter])

    def after_train(self, runner) -> None:
        if self._order is not None:
            dataloader = runner.train_dataloader
            dataloader.batch_sampler.sampler = self._order.sampler
            if hasattr(dataloader.dataset, '__dict__'):
                vars(dataloader.dataset).pop('__getitems__', None)
        if self._was_finished and runner.val_loop is not None:
            runner.logger.warning('The run is resumed at its end, with nothing left to train: it is '
                                  'validated, in case the last validation was interrupted.')
            runner.val_loop.run()


def _is_finished(runner) -> bool:
    """Whether a resumed run has no steps left, and its loop validates after the last step."""
    loop = runner.train_loop
    by_iter = isinstance(loop, IterBasedTrainLoop)
    done, end = (runner.iter, runner.max_iters) if by_iter else (runner.epoch, runner.max_epochs)
    return done >= max(end, getattr(loop, 'val_begin', 1))


def _has_started(loop) -> bool:
    """Whether workers already have the first batches. In mmengine 0.10.7 an iteration-based loop starts them."""
    iterator = getattr(loop, 'dataloader_iterator', None)
    return getattr(iterator, '_iterator', None) is not None and loop.dataloader.num_workers > 0


def _rebuild_loader(runner) -> DataLoader:
    """The loader with new samplers and the same data set."""
    loader = runner.train_loop.dataloader
    described = runner._train_dataloader
    if not isinstance(described, dict):  # the user's own
        return loader
    return runner.build_dataloader({**described, 'dataset': loader.dataset}, seed=runner.seed,
                                   diff_rank_seed=runner._randomness_cfg.get('diff_rank_seed', False))


def seed_everything(key: list[int]) -> None:
    """Seeds `random`, numpy and torch on every device from a few non-negative ints."""
    torch.manual_seed(seed_host(key))


def seed_host(key: list[int]) -> int:
    """Seeds `random`, numpy and torch's CPU generator from a few non-negative ints; returns the seed of the last.

    Samples need no other device. Without an initialized GPU, `torch.manual_seed` formats the stack of each call, which
    takes milliseconds.
    """
    words = np.random.SeedSequence(key).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.default_generator.manual_seed(int(words[2]))
    return int(words[2])


class _KeyedSampler:
    """Wraps a sampler; its indices have keys of their positions."""

    def __init__(self, sampler, seed: list[int]):
        self.sampler = sampler
        self._seed = seed
        self.start(0, 0)

    def start(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position

    def __iter__(self):
        for index in self.sampler:
            # The 1 distinguishes it from a step's key: SeedSequence ignores trailing zeros.
            key = (*self._seed, self._epoch, self._position, 1)
            self._position += 1
            yield _KeyedIndex(index, key)

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str):
        if name == 'sampler':  # missing while the object is being unpickled
            raise AttributeError(name)
        return getattr(self.sampler, name)


class _KeyedIndex(int):
    """An index with its key: seed, rank, epoch, position, 1."""

    def __new__(cls, index: int, key: tuple[int, ...]):
        self = super().__new__(cls, index)
        self.key = key
        return self

    def __getnewargs__(self):
        return int(self), self.key


def _seeded_items(dataset, indices: list) -> list:
    """The items of a batch. torch's DataLoader calls it as the data set's `__getitems__`."""
    items = []
    for index in indices:
        if isinstance(index, _KeyedIndex):
            seed_host([*index.key])
            index = int(index)
        items.append(dataset[index])
    return items
