"""Random numbers that depend on the place in the order of the data, and on nothing else."""
import pickle
import random

import numpy as np
import pytest
import torch
from mmengine.dataset import DefaultSampler, InfiniteSampler
from torch.utils.data import DataLoader

from mmunorm.engine.resume import _Index, _Numbered, _SeededItems, find_resumable, is_whole, seed_everything


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


class Noisy:
    """Each item draws from all three generators."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        assert type(index) is int
        return np.array([index, *draws()])


def loader(workers, sampler=InfiniteSampler, batch_size=4):
    dataset = Noisy()
    dataset.__getitems__ = _SeededItems(dataset)
    data = DataLoader(dataset, batch_size, sampler=sampler(dataset, seed=3), num_workers=workers,
                      collate_fn=np.stack, persistent_workers=workers > 0)
    data.batch_sampler.sampler = _Numbered(data.batch_sampler.sampler, [7, 0])
    return data


def take(data, count):
    iterator = iter(data)
    return [next(iterator) for _ in range(count)]


@pytest.mark.parametrize('workers', [1, 2])
def test_the_number_of_workers_does_not_matter(workers):
    expected = take(loader(0), 8)
    np.testing.assert_array_equal(take(loader(workers), 8), expected)
    assert len(np.unique(np.array(expected)[..., 1])) == 32  # no number twice, though pictures return


def test_a_skipped_part_is_as_if_it_had_been_drawn():
    expected = take(loader(0), 8)
    data = loader(0)
    data.sampler.skip(5 * 4)  # as IterBasedTrainLoop does
    data.batch_sampler.sampler.start(0, 5 * 4)
    np.testing.assert_array_equal(take(data, 3), expected[5:])


def test_an_epoch_begins_alike_whatever_came_before():
    data = loader(0, DefaultSampler)
    epochs = []
    for epoch in (0, 1, 1):
        data.sampler.set_epoch(epoch)
        data.batch_sampler.sampler.start(epoch, 0)
        draws()
        epochs.append(np.concatenate(list(data)))
    assert len(data) == 3 and len(data.batch_sampler.sampler) == 10
    np.testing.assert_array_equal(epochs[1], epochs[2])
    assert not np.isin(epochs[0][:, 1], epochs[1][:, 1]).any()


def test_processes_draw_different_numbers():
    results = []
    for rank in (0, 1):
        seed_everything([0, rank, 5])
        results.append(draws())
    assert not set(results[0]) & set(results[1])
    seed_everything([0, 1, 5])
    assert draws() == results[1]


def test_an_index_is_an_int_that_travels():
    index = pickle.loads(pickle.dumps(_Index(5, (1, 2))))
    assert index == 5 and index.place == (1, 2) and ['a'] * index == ['a'] * 5


def test_resumable(tmp_path):
    assert find_resumable(tmp_path / 'nowhere') == (None, [])
    torch.save({}, tmp_path / 'last_good.pth')
    torch.save({}, tmp_path / 'best_accuracy_epoch_3.pth')
    assert find_resumable(tmp_path) == (None, [])  # neither is a place to go on from
    (tmp_path / 'last_checkpoint').write_text('s3://bucket/epoch_1.pth')
    assert find_resumable(tmp_path) == ('s3://bucket/epoch_1.pth', [])
    # CheckpointHook's `out_dir` is another folder, of which only `last_checkpoint` knows.
    (tmp_path / 'other').mkdir()
    for name in ('iter_5', 'iter_10'):
        torch.save({}, tmp_path / f'other/{name}.pth')
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'other/iter_5.pth'))
    assert find_resumable(tmp_path)[0] == str(tmp_path / 'other/iter_10.pth')
    assert is_whole(tmp_path / 'other/iter_5.pth')
