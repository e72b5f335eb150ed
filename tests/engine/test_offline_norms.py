"""OfflineNormHook in one process: warm-up, means, small batches, loss scale."""
import logging
import re

import pytest
import torch
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.registry import HOOKS
from torch import nn

from mmunorm.engine import OfflineNormHook, set_loss_scale
from mmunorm.norms import MABN, PN, UN, TokenBN
from mmunorm.utils import PreflightError

from ..runs import loader, runner
from ..versions import amp_on_a_cpu, cpu_grad_scaler

NAMED = re.compile('warmup_iters')


class Model(BaseModel):

    def __init__(self, norm, times):
        super().__init__()
        self.norm, self.times = norm, times
        self.fc = nn.Linear(4, 1)

    def forward(self, x, mode='loss'):
        return dict(loss=sum(self.fc(self.norm(x * (1 + i))).square().mean() for i in range(self.times)))


def run(work_dir, max_iters, norm, samples=8, times=1, hooks=(), data=(), **kwargs):
    train = runner(work_dir, Model(norm, times), loader([dict(x=torch.randn(4)) for _ in range(samples)], **dict(data)),
                   max_iters, hooks=['OfflineNormHook', *hooks], interval=5, lr=0.01, **kwargs)
    train.train()
    return train.model.norm


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
    monkeypatch.setattr('mmunorm.engine.offline_norms.guards_attributes', lambda: False)
    with pytest.raises(PreflightError, match='set warmup_iters to a number of steps'):
        run(tmp_path / 'share', 5, UN(4, warmup_iters=0.5), cfg=dict(compile=True))


def test_frozen_means_that_no_weights_bring_are_refused(tmp_path):
    """Not if they were set or loaded, nor when resuming."""
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


NORMS = {
    'UN': lambda: UN(6, warmup_iters=10),
    'MABN': lambda: MABN(6, window=5, warmup_iters=10),
    'PN*': lambda: PN(6, layer_scale=False, warmup_iters=10),
}


class Regression(BaseModel):

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), NORMS[norm](), nn.ReLU(), nn.Linear(6, 6), NORMS[norm](),
                                 nn.Linear(6, 2))

    def forward(self, x, target, mode='loss'):
        return dict(loss=(self.net(x) - target).square().mean())


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, generator=generator) * (3 if step % 37 == 36 else 1)
    return x, torch.stack([x[:, 0] * x[:, 1], x.sum(1)], 1)


@pytest.mark.parametrize('norm', NORMS)
def test_a_loss_scale_cancels(norm):
    """Scales are powers of two, and cancel without rounding. A step that overflows is a forward pass alone."""
    scaled, plain = Regression(norm), Regression(norm)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (scaled, plain)]
    scaler = cpu_grad_scaler(init_scale=2.**20, growth_interval=5)
    skipped, scales = [], []
    for step in range(60):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = scaled(*batch(step))['loss']
        if step % 17 == 5:
            loss.register_hook(lambda gradient: gradient * torch.inf)
        set_loss_scale(scaled, scaler)
        scaler.scale(loss).backward()
        scales.append(scaler.get_scale())
        scaler.step(optimizers[0])
        scaler.update()
        loss = plain(*batch(step))['loss']
        if scaler.get_scale() < scales[-1]:
            skipped.append(step)
        else:
            loss.backward()
            optimizers[1].step()
    assert skipped == [5, 22, 39, 56] and len(set(scales)) > 3
    torch.testing.assert_close(scaled.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_a_factor_as_loss_scale_and_none():
    a, b = NORMS['UN'](), NORMS['UN']()
    set_loss_scale(a, torch.tensor(64.))
    for _ in range(20):
        x = torch.randn(5, 6)
        a(x.requires_grad_()).pow(3).sum().mul(64).backward()
        b(x).pow(3).sum().backward()
    assert torch.equal(a.psi, b.psi)
    set_loss_scale(a, None)
    assert a.loss_scale is None


@HOOKS.register_module()
class RecordScale(OfflineNormHook):
    """Records each step's scale in the norms."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        super().before_train_iter(runner, batch_idx, data_batch)
        assert runner.optim_wrapper.loss_scaler.get_scale() == runner.model.net[1].loss_scale
        self.scales = [*getattr(self, 'scales', []), runner.model.net[1].loss_scale.item()]


def test_the_loss_scale_of_mmengines_amp_wrapper(tmp_path, monkeypatch):
    def trained(name, hooks=(), **wrapper):
        data = [dict(zip(('x', 'target'), (t[0] for t in batch(step)), strict=True)) for step in range(40)]
        run = runner(tmp_path / name, Regression('UN'), loader(data, batch_size=8), hooks=hooks,
                     train_cfg=dict(by_epoch=True, max_epochs=6), default_hooks=dict(logger=None, checkpoint=None),
                     optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01), accumulative_counts=2, **wrapper))
        run.train()
        return run

    amp_on_a_cpu(monkeypatch)
    scaled = trained('scaled', ['RecordScale'], type='AmpOptimWrapper',
                     loss_scale=dict(init_scale=8., growth_interval=2))
    scales = next(hook for hook in scaled.hooks if isinstance(hook, RecordScale)).scales
    assert scales[0] == 8 and scales[-1] == 8 * 2**7
    torch.testing.assert_close(scaled.model.state_dict(), trained('plain').model.state_dict(), rtol=0, atol=0)
