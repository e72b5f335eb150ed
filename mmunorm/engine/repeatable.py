"""Runs that go on after an interruption as if there had been none."""
from __future__ import annotations

import random

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import BatchSampler


@HOOKS.register_module()
class RepeatableHook(Hook):
    """Makes every step's random numbers depend on the seed and the step alone, so that resuming is exact.

    mmengine seeds a run once. A resumed one starts with the first numbers again, and its data workers do
    too: augmentation, dropout and sampling differ from what the uninterrupted run would have drawn. With
    this hook training data are made with numbers that are seeded by their place in the order of the
    sampler, however many workers there are, and each step computes with numbers that are seeded by the
    step. A resumed run then ends with the same weights, where the device computes deterministically
    (`randomness=dict(deterministic=True)` on a GPU) and the run resumes with as many processes.

    Only the random generators of `random`, numpy and torch are seeded. A batch of an epoch-based loop is
    taken again from the epoch's beginning, as mmengine resumes there.

    mmengine saves a checkpoint before it validates, so a run that was interrupted in its last validation
    resumes at its end, where nothing is left to train. It is validated then, and has its last metrics.
    """
    priority = 'VERY_HIGH'

    def before_train(self, runner) -> None:
        self._seed = [runner.seed or 0, get_rank()]
        self._order = None
        self._was_over = _is_over(runner)
        dataloader = runner.train_dataloader
        if dataloader.batch_sampler is None or not hasattr(dataloader.batch_sampler, 'sampler'):
            runner.logger.warning(
                f'RepeatableHook: data of a {type(dataloader.batch_sampler).__name__} are not seeded one by '
                'one, so that a resumed run will draw other augmentations.')
            return
        self._order = _Numbered(dataloader.batch_sampler.sampler, self._seed)
        dataloader.batch_sampler.sampler = self._order
        if hasattr(dataloader.dataset, '__dict__'):  # anything but a plain list, which has nothing random
            dataloader.dataset.__getitems__ = _SeededItems(dataloader.dataset)

    def before_train_epoch(self, runner) -> None:
        if self._order is None:
            return
        if not isinstance(runner.train_loop, IterBasedTrainLoop):
            self._order.start(runner.epoch, 0)
            return
        # The loop forwards a sampler that can skip; from any other it draws, and the places count themselves.
        batches = runner.train_dataloader.batch_sampler
        forwarded = type(batches) is BatchSampler and hasattr(self._order.sampler, 'skip')
        self._order.start(0, runner.iter * batches.batch_size if forwarded else 0)

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        seed_everything([*self._seed, runner.iter])

    def after_train(self, runner) -> None:
        if self._order is not None:
            runner.train_dataloader.batch_sampler.sampler = self._order.sampler
        if self._was_over and runner.val_loop is not None:
            runner.logger.warning('The run is resumed at its end, with nothing left to train: it is '
                                  'validated, lest an interruption has kept it from that.')
            runner.val_loop.run()


def _is_over(runner) -> bool:
    """Whether a resumed run has no step left, though its loop would have validated after the last one."""
    loop = runner.train_loop
    by_iter = isinstance(loop, IterBasedTrainLoop)
    done, end = (runner.iter, runner.max_iters) if by_iter else (runner.epoch, runner.max_epochs)
    return done >= max(end, getattr(loop, 'val_begin', 1))


def seed_everything(key: list[int]) -> None:
    """Seeds `random`, numpy and torch on every device from a few non-negative ints."""
    words = np.random.SeedSequence(key).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.manual_seed(int(words[2]))


class _Numbered:
    """A sampler whose indices remember their place in its order; all else is the sampler's."""

    def __init__(self, sampler, seed: list[int]):
        self.sampler = sampler
        self._seed = seed
        self.start(0, 0)

    def start(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position

    def __iter__(self):
        for index in self.sampler:
            # The last number tells it from a step's key: SeedSequence does not count zeros at the end.
            place = (*self._seed, self._epoch, self._position, 1)
            self._position += 1
            yield _Index(index, place)

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str):
        if name == 'sampler':  # not there yet, while it is being unpickled
            raise AttributeError(name)
        return getattr(self.sampler, name)


class _Index(int):
    """An index with its place: seed, rank, epoch, position, 1."""

    def __new__(cls, index: int, place: tuple[int, ...]):
        self = super().__new__(cls, index)
        self.place = place
        return self

    def __getnewargs__(self):
        return int(self), self.place


class _SeededItems:
    """What torch's DataLoader calls for a batch of a data set, if that has it as `__getitems__`."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __call__(self, indices: list) -> list:
        items = []
        for index in indices:
            if isinstance(index, _Index):
                seed_everything([*index.place])
                index = int(index)
            items.append(self.dataset[index])
        return items
