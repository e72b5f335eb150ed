"""Runs that go on after an interruption as if there had been none."""
from __future__ import annotations

import os
import random
import re
import zipfile
from pathlib import Path

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import BatchSampler

_CHECKPOINT = re.compile(r'(epoch|iter)_\d+\.pth')


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
    """
    priority = 'VERY_HIGH'

    def before_train(self, runner) -> None:
        self._seed = [runner.seed or 0, get_rank()]
        self._order = None
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
            place = (*self._seed, self._epoch, self._position)
            self._position += 1
            yield _Index(index, place)

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str):
        if name == 'sampler':  # not there yet, while it is being unpickled
            raise AttributeError(name)
        return getattr(self.sampler, name)


class _Index(int):
    """An index with its place: seed, rank, epoch, position."""

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


def find_resumable(work_dir: str) -> tuple[str | None, list[str]]:
    """The checkpoint that a run in `work_dir` can go on from, and what was left out.

    mmengine writes a checkpoint and then its name into `last_checkpoint`. A run that was killed in between
    has a newer one than that says, and one that was killed while writing has a damaged one.

    Returns:
        The path of the newest whole checkpoint or None, and those of newer ones that are damaged.
    """
    folders = {Path(work_dir)}
    pointer = Path(work_dir, 'last_checkpoint')
    named = pointer.read_text().strip() if pointer.is_file() else ''
    if '://' in named:  # not ours to look into
        return named, []
    candidates = set()
    if named:
        folders.add(Path(named).parent)
        candidates.add(Path(named))
    for folder in folders:
        if folder.is_dir():
            candidates.update(path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name))
    files = {os.path.realpath(path): path for path in candidates if path.is_file()}
    damaged = []
    for path in sorted(files.values(), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if is_whole(path):
            return str(path), damaged
        damaged.append(str(path))
    return None, damaged


def is_whole(path: str | os.PathLike) -> bool:
    """Whether a file ends as one that torch.save has written; one that was cut off does not."""
    return zipfile.is_zipfile(path)
