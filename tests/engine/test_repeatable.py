"""Random numbers that depend only on the position in the order of the data."""
import random
from functools import partial

import numpy as np
import pytest
import torch
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import loops
from torch import nn
from torch.utils.data import DataLoader

from mmunorm.engine import repeatable
from mmunorm.engine.repeatable import _KeyedSampler, _seeded_items, seed_everything
from mmunorm.norms import UN

from .. import runs, tiny_runs


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
    dataset.__getitems__ = partial(_seeded_items, dataset)
    data = DataLoader(dataset, batch_size, sampler=sampler(dataset, seed=3), num_workers=workers,
                      collate_fn=np.stack, persistent_workers=workers > 0)
    data.batch_sampler.sampler = _KeyedSampler(data.batch_sampler.sampler, [7, 0])
    return data


def take(data, count):
    iterator = iter(data)
    return [next(iterator) for _ in range(count)]


def test_workers_and_skipped_parts_do_not_change_the_samples():
    expected = take(loader(0), 8)
    np.testing.assert_array_equal(take(loader(2), 8), expected)
    assert len(np.unique(np.array(expected)[..., 1])) == 32  # no number twice, though images return
    data = loader(0)
    if hasattr(data.sampler, 'skip'):  # an old mmengine's samplers cannot
        data.sampler.skip(5 * 4)  # as IterBasedTrainLoop does
        data.batch_sampler.sampler.start(0, 5 * 4)
        np.testing.assert_array_equal(take(data, 3), expected[5:])


def test_an_epoch_does_not_depend_on_earlier_ones():
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


def test_processes_steps_and_images_never_share_their_numbers():
    numbered = _KeyedSampler([4], [7, 0])
    numbered.start(3, 0)  # the first image of epoch 3, and step 3
    index, = numbered
    drawn = []
    for key in ([*index.key], [7, 0, 3], [7, 1, 3], [7, 0, 3]):
        seed_everything(key)
        drawn.append(draws())
    assert index == 4 and len({*sum(drawn, ())}) == 9 and drawn[1] == drawn[3]


class Model(BaseModel):

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), UN(3, warmup_iters=1))

    def forward(self, x, mode='loss'):
        return dict(loss=self.layers(x).square().mean()) if mode == 'loss' else [x]


class Count(BaseMetric):
    """The number of steps of the validated model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def process(self, data_batch, data_samples):
        self.results.append(self.model.layers[1].num_batches_tracked.item())

    def compute_metrics(self, results):
        return {'accuracy/top1': results[0]}


class Interrupt(Hook):

    def before_val(self, runner):
        if runner.iter == runner.max_iters:
            raise KeyboardInterrupt


@pytest.mark.parametrize('loop', [dict(by_epoch=True, max_epochs=4, val_interval=2),
                                  dict(by_epoch=False, max_iters=16, val_interval=8)])
def test_a_run_interrupted_in_its_last_validation_has_its_metrics(tmp_path, loop, capfd):

    def train(*hooks, resume=True, **settings):
        model, data = Model(), runs.loader([dict(x=torch.randn(5, 3)) for _ in range(8)])
        checkpoint = dict(type='CheckpointHook', interval=loop['val_interval'], by_epoch=loop['by_epoch'],
                          save_best='accuracy/top1', rule='greater')
        runs.runner(tmp_path, model, data, train_cfg={**loop, **settings}, val_dataloader=data, val_cfg={},
                    val_evaluator=[Count(model)], resume=resume, log_processor=dict(by_epoch=loop['by_epoch']),
                    default_hooks=dict(checkpoint=checkpoint, logger=dict(type='LoggerHook', interval=2)),
                    hooks=['RepeatableHook', 'OfflineNormHook', *hooks]).train()

    def accuracies():
        return [entry['accuracy/top1'] for entry in tiny_runs.scalars(tmp_path) if 'accuracy/top1' in entry]

    with pytest.raises(KeyboardInterrupt):
        train(Interrupt(), resume=False)
    # Logs are in folders that are named by the second.
    log, = (path for path in tmp_path.glob('2*') if path.is_dir())
    log.rename(tmp_path / '1')
    assert accuracies() == [8]
    capfd.readouterr()
    train()
    assert 'nothing left to train: it is validated' in ''.join(capfd.readouterr())
    assert accuracies() == [8, 16]
    assert next(tmp_path.glob('best_*')).name.endswith(('epoch_4.pth', 'iter_16.pth'))
    # A loop that never validates does not validate here.
    train(val_begin=17)
    assert 'it is validated' not in ''.join(capfd.readouterr())


class Images(Noisy):
    metainfo = {}

    def get_data_info(self, index):
        return dict(width=1 + index % 2, height=2)

    def __getitem__(self, index):
        return dict(x=torch.tensor(super().__getitem__(index)[:3]).float().expand(5, 3))


class KeepData(Hook):

    def __init__(self):
        self.data = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.data.append(data_batch['x'][:, 0].clone())


class Eager(loops._InfiniteDataloaderIterator):
    """As that of mmengine 0.10.7: workers load the first batches before a hook is called."""

    def __init__(self, dataloader):
        super().__init__(dataloader)
        self._iterator = self._iterator or iter(dataloader)

    def skip_iter(self, number):
        for _ in range(number):
            next(self)


@pytest.mark.parametrize('batch_sampler', [pytest.param({}, marks=pytest.mark.grid),
                                           dict(batch_sampler=dict(type='AspectRatioBatchSampler'))])
def test_workers_that_load_before_the_run_begins_change_nothing(tmp_path, monkeypatch, batch_sampler):
    def train(workers, stop, resume=False):
        kept, dataset = KeepData(), Images()
        data = runs.loader(dataset, num_workers=workers, persistent_workers=workers > 0,
                           sampler=dict(type='InfiniteSampler'), **batch_sampler)
        runs.runner(tmp_path, Model(), data, stop, hooks=['RepeatableHook', kept], interval=3, resume=resume,
                    randomness=dict(seed=0), default_scope='mmdet').train()
        assert '__getitems__' not in vars(dataset)  # after training, it is as it was
        return torch.stack(kept.data)

    expected = train(0, 9)
    monkeypatch.setattr(loops, '_InfiniteDataloaderIterator', Eager)
    monkeypatch.delattr(InfiniteSampler, 'skip', raising=False)
    torch.testing.assert_close(train(1, 9), expected, rtol=0, atol=0)
    torch.testing.assert_close(train(1, 3), expected[:3], rtol=0, atol=0)
    torch.testing.assert_close(train(1, 9, resume=True), expected[3:], rtol=0, atol=0)


@pytest.mark.parametrize('skips, batch_sampler', [
    (True, {}), (False, {}), (True, dict(batch_sampler=dict(type='AspectRatioBatchSampler')))])
def test_a_resumed_run_counts_the_places_once(tmp_path, monkeypatch, skips, batch_sampler):
    """The loop skips in a sampler if it can and torch's BatchSampler wraps it; else it draws."""
    if not skips:
        monkeypatch.delattr(InfiniteSampler, 'skip', raising=False)
    keys, seeded = [], repeatable.seed_host

    def train(stop, resume=False):
        data = runs.loader(Images(), sampler=dict(type='InfiniteSampler'), **batch_sampler)
        keys.clear()
        runs.runner(tmp_path, Model(), data, stop, hooks=['RepeatableHook'], interval=3, resume=resume,
                    randomness=dict(seed=0), default_scope='mmdet').train()
        return [key for key in keys if len(key) == 5]

    monkeypatch.setattr(repeatable, 'seed_host', lambda key: keys.append(tuple(key)) or seeded(key))
    expected, _ = train(6), train(3)
    assert train(6, resume=True)[-6:] == expected[6:]
