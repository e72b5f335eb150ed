import logging
import re

import pytest
import torch
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn

import mmunorm  # noqa: F401
from mmunorm.norms import MABN, PN, UN, PRepBN, TokenBN
from mmunorm.utils import PreflightError

NAMED = re.compile('warmup_iters|PRepBN|last of the')


class Model(BaseModel):

    def __init__(self, norm, times=1):
        super().__init__()
        self.norm, self.times = norm, times
        self.fc = nn.Linear(4, 1)

    def forward(self, x, mode='loss'):
        return dict(loss=sum(self.fc(self.norm(x * (1 + i))).square().mean() for i in range(self.times)))


def run(work_dir, max_iters, norm=None, samples=8, batch_size=2, sampler='DefaultSampler', drop_last=False, times=1,
        **kwargs):
    runner = Runner(
        model=Model(norm or UN(4, warmup_iters=10), times),
        work_dir=str(work_dir),
        train_dataloader=dict(batch_size=batch_size, dataset=[dict(x=torch.randn(4)) for _ in range(samples)],
                              sampler=dict(type=sampler, shuffle=False), drop_last=drop_last,
                              collate_fn=dict(type='default_collate')),
        train_cfg=dict(by_epoch=False, max_iters=max_iters),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        default_hooks=dict(offline_norms=dict(type='OfflineNormHook'),
                           checkpoint=dict(type='CheckpointHook', interval=5, by_epoch=False)),
        experiment_name=work_dir.name,
        **kwargs)
    runner.train()
    return runner.model.norm


@pytest.fixture
def warnings(monkeypatch):
    """What the hook warns of; mmengine's loggers do not propagate."""
    found = []
    monkeypatch.setattr(MMLogger, 'callHandlers', lambda self, record: found.append(record.getMessage()) if
                        record.levelno == logging.WARNING and NAMED.search(record.getMessage()) else None)
    return found


@pytest.mark.parametrize('norm, steps, text', [
    (lambda: UN(4, warmup_iters=10), 10, '10 training steps .*warmup_iters=10'),
    (lambda: UN(4, warmup_iters=10), 11, None), (lambda: MABN(4, warmup_iters=9), 4, 'MABN never .*warmup_iters=9'),
    (lambda: PRepBN(4, steps=8), 5, '8 more training steps, and the run has 5'), (lambda: PRepBN(4, steps=5), 5, None),
    (lambda: TokenBN(4), 4, None), (lambda: nn.LayerNorm(4), 4, None)])
def test_warns_once_of_a_run_that_ends_in_warmup(tmp_path, warnings, norm, steps, text):
    run(tmp_path, steps, norm())
    assert len(warnings) == (text is not None) and all(re.search(text, warning) for warning in warnings)


@pytest.mark.parametrize('norm', [UN, MABN, PN])
def test_fine_tuning_starts_the_warmup_again_and_resuming_does_not(tmp_path, norm):
    first = run(tmp_path / 'first', 15, norm(4, warmup_iters=2))
    checkpoint = str(tmp_path / 'first' / 'iter_15.pth')
    tuned = run(tmp_path / 'tuned', 5, norm(4, warmup_iters=2), load_from=checkpoint)
    assert first.num_batches_tracked == 15 and tuned.num_batches_tracked == 5
    assert not torch.equal(tuned.running_var, torch.ones(4))
    resumed = run(tmp_path / 'resumed', 20, norm(4, warmup_iters=2), load_from=checkpoint, resume=True)
    assert resumed.num_batches_tracked == 20


def test_a_resumed_run_lets_prepbn_end_its_steps(tmp_path, warnings):
    run(tmp_path / 'first', 5, PRepBN(4, steps=5))
    resumed = run(tmp_path / 'resumed', 8, PRepBN(4, steps=8), load_from=str(tmp_path / 'first' / 'iter_5.pth'),
                  resume=True)
    assert not warnings and not resumed.fold_obstacle


class Averaged(UN):
    """Keeps for each forward pass whether it used averages."""

    def forward(self, x):
        y = super().forward(x)
        exact = self.weight * x * (x.square().mean(0) + self.eps).rsqrt() + self.bias
        self.averaged = [*getattr(self, 'averaged', []), not torch.allclose(y, exact)]
        return y


def test_a_share_of_the_run_is_that_of_the_whole_run_when_it_resumes(tmp_path, warnings):
    def averaged(name, max_iters, times=1, window=2, **kwargs):
        norm = Averaged(4, window=window, warmup_iters=0.25, outlier_filter=False)
        return run(tmp_path / name, max_iters, norm, times=times, **kwargs).averaged[times - 1::times]

    assert averaged('once', 40) == averaged('first', 40, times=5) == [False] * 10 + [True] * 30
    early, late = (str(tmp_path / 'first' / f'iter_{step}.pth') for step in (5, 15))
    assert averaged('early', 40, times=5, load_from=early, resume=True) == [False] * 5 + [True] * 30
    assert averaged('late', 40, times=5, load_from=late, resume=True) == [True] * 25
    assert averaged('tuned', 20, times=5, load_from=late) == [False] * 5 + [True] * 15
    assert averaged('short', 5, window=4) == [False] * 4 + [True]  # until the records are full
    assert not warnings


def test_a_share_is_refused_where_compiled_code_would_not_see_it_end(tmp_path, monkeypatch):
    monkeypatch.setattr('mmunorm.engine.offline_norms.sees_attributes', lambda: False)
    with pytest.raises(PreflightError, match='set warmup_iters to a number of steps'):
        run(tmp_path / 'share', 5, UN(4, warmup_iters=0.5), cfg=dict(compile=True))


def test_frozen_means_that_no_weights_bring_are_refused(tmp_path):
    """Not if they were set or loaded, nor on resuming."""
    frozen = dict(warmup_iters=1, centered='frozen')
    with pytest.raises(PreflightError, match="centered='frozen' keeps .* of the model's 1 such norms none has a mean"):
        run(tmp_path / 'none', 5, UN(4, **frozen))
    run(tmp_path / 'pretrained', 5, UN(4, warmup_iters=1, centered=True))
    pretrained = str(tmp_path / 'pretrained/iter_5.pth')
    norm = run(tmp_path / 'tuned', 5, UN(4, **frozen), load_from=pretrained)
    mean = torch.load(pretrained, weights_only=False)['state_dict']['norm.running_mean']
    assert torch.equal(norm.running_mean, mean) and mean.any()
    assert torch.equal(run(tmp_path / 'on', 10, UN(4, **frozen), load_from=str(tmp_path / 'tuned/iter_5.pth'),
                           resume=True).running_mean, mean)


def test_warns_of_an_epoch_that_ends_with_a_few_samples(tmp_path, warnings):
    few = dict(samples=18, batch_size=17, custom_hooks=[dict(type='RepeatableHook')])  # it wraps the sampler
    run(tmp_path / 'few', 1, UN(4, warmup_iters=0), **few)
    assert len(warnings) == 1 and 'last of the 2 batches of an epoch has 1 of 17 samples' in warnings[0]
    run(tmp_path / 'dropped', 1, UN(4, warmup_iters=0), drop_last=True, **few)
    run(tmp_path / 'endless', 1, UN(4, warmup_iters=0), sampler='InfiniteSampler', **few)
    run(tmp_path / 'per_token', 1, nn.LayerNorm(4), **few)
    run(tmp_path / 'half', 1, UN(4, warmup_iters=0), **{**few, 'samples': 25})
    run(tmp_path / 'long', 1, UN(4, warmup_iters=0), **{**few, 'samples': 17 * 200 + 1})
    assert len(warnings) == 1
