"""Batches with similar numbers of tokens."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from mmengine.dataset import DefaultSampler
from mmengine.registry import DATA_SAMPLERS

from mmunorm.utils import PreflightError


@DATA_SAMPLERS.register_module()
class TokenBatchSampler:
    """Batches of pairs of similar length with at most `max_tokens` tokens, for `batch_sampler=dict(...)`.

    mmengine passes `sampler` and `batch_size` from the config of the data loader. In each epoch, pairs are sorted by
    length, with equal lengths in random order, and split into batches, which are shuffled. All epochs, and all
    processes of a distributed run, have the same number of batches; some may be repeated for that.

    With a seed in the config, a resumed run continues with the same batches.

    Args:
        sampler (DefaultSampler): a sampler whose data set has `lengths`; its `shuffle`, seed and epoch are used, its
            order is not.
        batch_size (int): maximum number of pairs in a batch.
        max_tokens (int): maximum number of tokens in a batch: its pairs times the length of its longest sentence, on
            the longer side.

    Raises:
        PreflightError: a pair is longer than `max_tokens`, or the sampler or data set is of another type.
    """

    def __init__(self, sampler: DefaultSampler, batch_size: int, max_tokens: int):
        if not isinstance(sampler, DefaultSampler):
            raise PreflightError("TokenBatchSampler needs sampler=dict(type='DefaultSampler', shuffle=...), got a "
                                 f'{type(sampler).__name__}.')
        lengths = getattr(sampler.dataset, 'lengths', None)
        if lengths is None:
            raise PreflightError('TokenBatchSampler needs a TranslationDataset, got a '
                                 f'{type(sampler.dataset).__name__}.')
        longest = lengths.max(axis=1)
        if longest.max() > max_tokens:
            raise PreflightError(f'max_tokens={max_tokens} is less than the {longest.max()} tokens of the longest '
                                 'sentence: raise it, or set max_length of the data set.')
        self.sampler = sampler
        # Sorted by the longer side, then by the source, then by the target.
        self._keys = np.stack([lengths[:, 1], lengths[:, 0], longest])
        # Equal lengths are shuffled in each epoch; the boundaries of batches are fixed.
        self._boundaries = _batch_boundaries(np.sort(longest), batch_size, max_tokens)

    def __len__(self) -> int:
        """The number of batches of this process in an epoch."""
        return -(-(len(self._boundaries) - 1) // self.sampler.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        sampler, batches, pairs = self.sampler, np.arange(len(self._boundaries) - 1), np.arange(self._keys.shape[1])
        if sampler.shuffle:
            random = np.random.default_rng((sampler.seed, sampler.epoch))
            random.shuffle(pairs)
            random.shuffle(batches)
        order = pairs[np.lexsort(self._keys[:, pairs])]
        batches = np.resize(batches, len(self) * sampler.world_size)
        for batch in batches[sampler.rank::sampler.world_size]:
            yield order[self._boundaries[batch]:self._boundaries[batch + 1]].tolist()


def _batch_boundaries(longest: np.ndarray, batch_size: int, max_tokens: int) -> np.ndarray:
    """The boundaries of batches in pairs sorted by their longer side, with as many pairs per batch as fit."""
    boundaries = [0]
    while boundaries[-1] < len(longest):
        start = boundaries[-1]
        window = longest[start:start + min(batch_size, max_tokens // longest[start])]
        fits = np.arange(1, len(window) + 1) * window <= max_tokens
        boundaries.append(start + int(fits.sum()))
    return np.array(boundaries)
