import logging
import re

import pytest
import torch
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
def warnings(caplog):
    """What the hook warns of; mmengine's loggers do not propagate, hence the handler."""
    found = []

    class Handler(logging.Handler):

        def emit(self, record):
            if record.levelno == logging.WARNING and NAMED.search(record.getMessage()):
                found.append(record.getMessage())

    from mmengine.logging import MMLogger
    original = MMLogger.callHandlers

    def call_handlers(self, record):
        Handler().emit(record)
        return original(self, record)

    MMLogger.callHandlers = call_handlers
    yield found
    MMLogger.callHandlers = original


def test_warns_once_of_a_run_that_ends_in_warmup(tmp_path, warnings):
    run(tmp_path / 'short', 10)
    assert len(warnings) == 1
    assert '10 training steps' in warnings[0] and 'warmup_iters=10' in warnings[0]


def test_warns_of_other_norms_by_their_names(tmp_path, warnings):
    run(tmp_path / 'mabn', 4, MABN(4, warmup_iters=9))
    assert len(warnings) == 1 and 'MABN never' in warnings[0] and 'warmup_iters=9' in warnings[0]
    run(tmp_path / 'bn', 4, TokenBN(4))
    assert len(warnings) == 1


def test_warns_of_a_run_that_ends_before_prepbn_lets_go_of_layer_norm(tmp_path, warnings):
    run(tmp_path / 'long', 5, PRepBN(4, steps=5))
    assert not warnings
    checkpoint = str(tmp_path / 'short' / 'iter_5.pth')
    run(tmp_path / 'short', 5, PRepBN(4, steps=8))
    assert len(warnings) == 1 and '8 more training steps, and the run has 5' in warnings[0]
    norm = run(tmp_path / 'resumed', 8, PRepBN(4, steps=8), load_from=checkpoint, resume=True)
    assert len(warnings) == 1 and not norm.fold_obstacle


@pytest.mark.parametrize('norm', [MABN, PN])
def test_the_warmup_of_other_norms_starts_with_the_run_too(tmp_path, norm):
    run(tmp_path / 'first', 15, norm(4, warmup_iters=2))
    checkpoint = str(tmp_path / 'first' / 'iter_15.pth')
    tuned = run(tmp_path / 'tuned', 5, norm(4, warmup_iters=2), load_from=checkpoint)
    assert tuned.num_batches_tracked == 5


def test_quiet_when_the_run_is_long_enough(tmp_path, warnings):
    norm = run(tmp_path / 'long', 11)
    assert norm.num_batches_tracked == 11
    assert not warnings


def test_quiet_without_un(tmp_path, warnings):
    run(tmp_path / 'ln', 5, nn.LayerNorm(4))
    assert not warnings


def test_fine_tuning_starts_the_warmup_again_and_resuming_does_not(tmp_path):
    first = run(tmp_path / 'first', 15)
    checkpoint = str(tmp_path / 'first' / 'iter_15.pth')
    tuned = run(tmp_path / 'tuned', 5, load_from=checkpoint)
    assert first.num_batches_tracked == 15 and tuned.num_batches_tracked == 5
    assert not torch.equal(tuned.running_var, torch.ones(4))
    resumed = run(tmp_path / 'resumed', 20, load_from=checkpoint, resume=True)
    assert resumed.num_batches_tracked == 20


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


@pytest.mark.parametrize('hooks', [[], [dict(type='RepeatableHook')]])
def test_warns_of_an_epoch_that_ends_with_a_few_samples(tmp_path, warnings, hooks):
    few = dict(samples=18, batch_size=17, custom_hooks=hooks)
    run(tmp_path / 'few', 1, UN(4, warmup_iters=0), **few)
    assert len(warnings) == 1 and 'last of the 2 batches of an epoch has 1 of 17 samples' in warnings[0]
    run(tmp_path / 'dropped', 1, UN(4, warmup_iters=0), drop_last=True, **few)
    run(tmp_path / 'endless', 1, UN(4, warmup_iters=0), sampler='InfiniteSampler', **few)
    run(tmp_path / 'per_token', 1, nn.LayerNorm(4), **few)
    run(tmp_path / 'half', 1, UN(4, warmup_iters=0), **{**few, 'samples': 25})
    run(tmp_path / 'long', 1, UN(4, warmup_iters=0), **{**few, 'samples': 17 * 200 + 1})
    assert len(warnings) == 1
