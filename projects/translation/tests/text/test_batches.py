import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.runner import Runner
from mmengine.runner.loops import _InfiniteDataloaderIterator

from mmunorm.utils import PreflightError
from projects.translation.translation.text import TokenBatchSampler


class Lengths(list):
    """A data set of which only the lengths are known."""

    @property
    def lengths(self):
        return np.array(self)


def batches(lengths, epoch=0, rank=0, world_size=1, shuffle=True, max_tokens=40, batch_size=9):
    sampler = DefaultSampler(Lengths(lengths), shuffle=shuffle, seed=3)
    sampler.rank, sampler.world_size = rank, world_size
    sampler.set_epoch(epoch)
    sampler = TokenBatchSampler(sampler, batch_size, max_tokens)
    found = list(sampler)
    assert len(found) == len(sampler)
    return found


def tokens(lengths, batch):
    return len(batch) * max(max(lengths[i]) for i in batch)


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=80)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.booleans(), st.integers(1, 4))
def test_each_pair_comes_once_in_batches_that_fit(lengths, shuffle, world_size):
    alone = batches(lengths, shuffle=shuffle)
    assert sorted(i for batch in alone for i in batch) == list(range(len(lengths)))
    assert all(tokens(lengths, batch) <= 40 and len(batch) <= 9 for batch in alone)
    ranks = [batches(lengths, rank=rank, world_size=world_size, shuffle=shuffle) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    together = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert together[:len(alone)] == alone and len(together) - len(alone) < world_size
    assert all(batch in alone for batch in together)


@settings(max_examples=50, deadline=None)
@given(LENGTHS)
def test_batches_are_as_full_as_they_can_be(lengths):
    longest = sorted(map(max, lengths))
    expected, start = [], 0
    for i in range(len(longest)):
        if (i + 1 - start) * longest[i] > 40 or i - start == 9:
            expected.append(i - start)
            start = i
    expected.append(len(longest) - start)
    assert [len(batch) for batch in batches(lengths, shuffle=False)] == expected


def test_epochs_differ_and_repeat_themselves():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, (300, 2)).tolist()
    first, again, second = (batches(lengths, epoch) for epoch in (0, 0, 1))
    assert first == again and len(first) == len(second)
    assert set(map(frozenset, first)) != set(map(frozenset, second))  # not only their order
    assert [max(lengths[batch[0]]) for batch in first] != sorted(max(lengths[batch[0]]) for batch in first)
    straight = batches(lengths, shuffle=False)
    assert straight == batches(lengths, 1, shuffle=False)
    longest = [max(lengths[i]) for batch in straight for i in batch]
    assert longest == sorted(longest)


def test_mmengines_loops_set_the_next_epoch():
    lengths = np.random.default_rng(0).integers(1, 9, (60, 2)).tolist()
    loader = Runner.build_dataloader(dict(
        dataset=Lengths(lengths), sampler=dict(type='DefaultSampler', shuffle=True), batch_size=9,
        batch_sampler=dict(type='TokenBatchSampler', max_tokens=40), num_workers=0,
        collate_fn=dict(type=lambda items: items)), seed=3)
    iterator = _InfiniteDataloaderIterator(loader)
    found = [next(iterator) for _ in range(2 * len(loader))]
    assert found == [[lengths[i] for i in batch] for epoch in (0, 1) for batch in batches(lengths, epoch)]


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(PreflightError, match='max_tokens=40 is less than the 41 tokens .* max_length'):
        batches([(3, 41), (1, 1)])
    with pytest.raises(PreflightError, match='needs a TranslationDataset, got a list'):
        TokenBatchSampler(DefaultSampler([1, 2], seed=0), 9, 40)
    with pytest.raises(PreflightError, match=r"needs sampler=dict\(type='DefaultSampler'.* got a InfiniteSampler"):
        TokenBatchSampler(InfiniteSampler(Lengths([(1, 1)]), seed=0), 9, 40)
