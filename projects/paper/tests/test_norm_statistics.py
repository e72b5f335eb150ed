import copy
import json
import math
import os
import shutil
import signal
from functools import partial

import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmunorm.norms import MABN, RMSN, UN, NoNorm
from mmunorm.norms.layers import norm_layers
from mmunorm.utils import Interrupted, PreflightError
from projects.paper.paper import DivergenceError, NormStatisticsHook, PRepBN
from projects.paper.paper.norm_record import OFFLINE_GRADIENT, ONLINE_GRADIENT, NormRecord
from projects.paper.paper.normality import pnac
from tests.processes import FORKSERVER
from tests.runs import loader, runner
from tests.tiny_runs import load_tool
from tests.versions import amp_on_a_cpu


class Model(BaseModel):
    """Two norms of tokens in residual branches."""

    def __init__(self, first, second=None, checkpointed=None):
        super().__init__()
        self.fc1, self.norm1 = nn.Linear(6, 6), first
        self.fc2, self.norm2 = nn.Linear(6, 6), second or nn.LayerNorm(6)
        self.checkpointed = checkpointed

    def block(self, x):
        return x + self.norm1(self.fc1(x)).relu()

    def forward(self, x, mode='loss'):
        if self.checkpointed is None:
            x = self.block(x)
        else:
            x = checkpoint(self.block, x.requires_grad_(), use_reentrant=self.checkpointed)
        return dict(loss=self.norm2(self.fc2(x)).cos().mean())


class Maps(BaseModel):

    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm1 = nn.Conv1d(5, 6, 1), norm
        self.unused = nn.LayerNorm(3)

    def forward(self, x, mode='loss'):
        return dict(loss=self.norm1(self.conv(x)[..., None]).sin().mean())


class Watch:
    """Keeps each norm's input, its output without beta, and the gradient there, channels last, of every forward."""

    def __init__(self, model):
        self.x, self.gamma_z, self.dy = ({name: [] for name, _ in norm_layers(model)} for _ in range(3))
        for name, norm in norm_layers(model):
            norm.register_forward_hook(partial(self.keep, name))

    def keep(self, name, norm, args, y):
        axis = 1 if y.dim() == 4 else -1
        if torch._C._current_graph_task_id() == -1:  # not again in a checkpoint's backward pass
            bias = getattr(norm, 'bias', None)
            self.x[name].append(args[0].detach().movedim(axis, -1).clone())
            self.gamma_z[name].append(y.detach().movedim(axis, -1) - (0 if bias is None else bias.detach()))
        if y.requires_grad:
            y.register_hook(lambda dy: self.dy[name].append(dy.movedim(axis, -1).clone()))

    def check(self, record, *names, forwards=1):
        """Checks the record of norms that ran so many times in each step."""
        for name in names or ('norm1',):
            is_offline = record.layers[record.index(name)].gradient == OFFLINE_GRADIENT
            for i in range(len(record.steps)):
                rows = slice(forwards * i, forwards * (i + 1))
                # Backward passes come in the opposite order.
                x, gamma_z, dy = map(torch.cat, (self.x[name][rows], self.gamma_z[name][rows],
                                                 self.dy[name][rows][::-1]))
                np.testing.assert_allclose(record.activation(name)[i], mean_square(x), rtol=1e-5)
                expected = (dy * gamma_z).flatten(0, -2).mean(0) if is_offline else mean_square(dy)
                np.testing.assert_allclose(record.gradient(name)[i], expected, rtol=1e-3, atol=1e-8)
            assert len(self.x[name]) == len(self.dy[name]) == forwards * len(record.steps)


def train(work_dir, model, steps=6, hook=None, run=lambda runner: runner.train(), **kwargs):
    torch.manual_seed(0)
    run(runner(work_dir, model, loader([dict(x=torch.randn(5, 6)) for _ in range(8)]), steps,
               [dict(hook or {}, type='NormStatisticsHook')],
               default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=3, by_epoch=False),
                                  logger=dict(type='LoggerHook', interval=1)), **kwargs))
    return NormRecord(work_dir / 'norm_statistics')


def mean_square(x):
    return x.double().flatten(0, -2).square().mean(0)


@pytest.mark.parametrize('checkpointed', [None, False, True])
def test_un_and_layer_norm_against_their_own_tensors(tmp_path, checkpointed):
    model = Model(UN(6, warmup_iters=2, window=2), checkpointed=checkpointed)
    watch = Watch(model)
    record = train(tmp_path / 'w', model)
    assert record.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert [tuple(layer) for layer in record.layers] == [('norm1', 'UN', 6, OFFLINE_GRADIENT),
                                                         ('norm2', 'LayerNorm', 6, ONLINE_GRADIENT)]
    watch.check(record, 'norm1', 'norm2')
    for name in ('norm1', 'norm2'):
        steps, mean = record.mean(name)
        assert steps.tolist() == [1, 4]  # of each block
        np.testing.assert_allclose(mean, torch.stack([watch.x[name][i].flatten(0, -2).mean(0) for i in (0, 3)]),
                                   rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(record.running_var('norm1')[1][0], 0.9 + 0.1 * mean_square(watch.x['norm1'][0]),
                               rtol=1e-5)
    assert np.isnan(record.running_var('norm2')[1]).all()
    assert record.outliers()[:, 1].tolist() == [-1] * 6
    assert record.outliers()[-1, 0] == model.norm1.num_outliers


def test_an_outlier_step_is_recorded_unfiltered(tmp_path):
    """UN's own window holds `running_var` there."""
    model = Model(UN(6, warmup_iters=2, window=2))
    watch = Watch(model)
    model.norm1.register_forward_pre_hook(
        lambda norm, args: (args[0] * (100 if norm.num_batches_tracked == 4 else 1),))
    record = train(tmp_path / 'w', model)
    assert record.outliers()[:, 0].tolist()[3:5] == [0, 1]
    np.testing.assert_allclose(record.activation(0), torch.stack(list(map(mean_square, watch.x['norm1']))), rtol=1e-5)
    assert record.activation(0)[4].min() > 10 * record.activation(0)[[0, 1, 2, 3]].max()


# While PRepBN blends, the gradient of gamma is that of one branch: it is recorded as if it were online.
@pytest.mark.parametrize('norm, is_offline', [
    (MABN(6), True), (PRepBN(6, steps=10), False), (RMSN(6), False), (NoNorm(6), False), (nn.BatchNorm2d(6), True),
    (nn.GroupNorm(2, 6), False)])
def test_every_norm_of_the_family_and_of_maps(tmp_path, norm, is_offline):
    model = (Maps if isinstance(norm, (nn.BatchNorm2d, nn.GroupNorm)) else Model)(copy.deepcopy(norm))
    watch = Watch(model)
    record = train(tmp_path / 'w', model, steps=3)
    assert (record.layers[0].gradient == OFFLINE_GRADIENT) is is_offline
    watch.check(record)
    assert record.gradient(0).any(axis=1).all()
    if isinstance(model, Maps):  # a layer that does not run has nothing
        assert np.isnan(record.activation('unused')).all() and np.isnan(record.gradient('unused')).all()


def test_a_frozen_layer_has_no_gradient(tmp_path):
    model = Model(UN(6, warmup_iters=2))
    model.fc1.requires_grad_(False)
    model.norm1.requires_grad_(False)
    record = train(tmp_path / 'w', model)
    assert np.isfinite(record.activation(0)).all() and np.isnan(record.gradient(0)).all()
    assert np.isfinite(record.gradient(1)).all()


def test_gradient_accumulation_records_every_forward(tmp_path):
    """Its own gradient, with the division by the steps, and not the sum that `weight.grad` holds."""
    model = Model(UN(6, warmup_iters=100))
    watch = Watch(model)
    watch.check(train(tmp_path, model, steps=2, optim_wrapper=dict(
        optimizer=dict(type='SGD', lr=0.1), accumulative_counts=2)), 'norm1', 'norm2')


def test_a_loss_scale_is_divided_out(tmp_path, monkeypatch):
    amp_on_a_cpu(monkeypatch)

    def gradients(name, **wrapper):
        torch.manual_seed(1)
        record = train(tmp_path / name, Model(UN(6)), steps=1, optim_wrapper=dict(
            optimizer=dict(type='SGD', lr=0.1), **wrapper))
        return [record.gradient(i) for i in (0, 1)]

    scaled = gradients('scaled', type='AmpOptimWrapper', loss_scale=1024.)
    for expected, actual in zip(gradients('plain'), scaled, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4)


class Shared(BaseModel):
    """One norm in three blocks, the last of which has fewer tokens; each is a checkpointed segment, if any is."""

    def __init__(self, norm, checkpointed):
        super().__init__()
        self.fc, self.norm1, self.checkpointed = nn.Linear(6, 6), norm, checkpointed

    def block(self, x):
        return x + self.norm1(self.fc(x)).sin()

    def forward(self, x, mode='loss'):
        for tokens in (5, 5, 2):
            x = x[:tokens]
            x = checkpoint(self.block, x.requires_grad_(), use_reentrant=True) if self.checkpointed else self.block(x)
        return dict(loss=x.cos().mean())


@pytest.mark.parametrize('checkpointed', [False, True])
@pytest.mark.parametrize('norm', [UN, nn.LayerNorm])
def test_shared_layers_have_all_their_tokens(tmp_path, norm, checkpointed):
    model = Shared(norm(6), checkpointed)
    watch = Watch(model)
    record = train(tmp_path / 'w', model, steps=2)
    assert len(record.layers) == 1
    watch.check(record, forwards=3)


def test_interval_and_layers(tmp_path):
    record = train(tmp_path / 'w', Model(UN(6)), steps=7, hook=dict(interval=2, layers=['1$']))
    assert record.steps.tolist() == [2, 4, 6]
    assert [layer.name for layer in record.layers] == ['norm1']
    with pytest.raises(PreflightError, match=r"'typo'.*norm1, norm2"):
        train(tmp_path / 'x', Model(UN(6)), hook=dict(layers=['norm', 'typo']))


@pytest.mark.parametrize('arguments', [dict(interval=0), dict(span=5), dict(layers='norm1')])
def test_arguments_are_checked(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        NormStatisticsHook(**arguments)


def test_resume_has_no_gap_and_nothing_twice(tmp_path):
    start = Model(UN(6, warmup_iters=2))  # for both: whether the filter fires depends on the weights
    whole = train(tmp_path / 'whole', copy.deepcopy(start), steps=9)
    train(tmp_path / 'parts', start, steps=5)  # checkpoints at 3 and 5
    parts = train(tmp_path / 'parts', Model(UN(6, warmup_iters=2)), steps=9, resume=True,
                  load_from=str(tmp_path / 'parts/iter_3.pth'))
    assert parts.steps.tolist() == whole.steps.tolist() == list(range(1, 10))
    np.testing.assert_array_equal(parts.outliers(), whole.outliers())
    for hook, text in ((dict(layers=['1$']), 'other layers'), (dict(interval=2), 'with interval=1, and')):
        with pytest.raises(PreflightError, match=text):
            train(tmp_path / 'parts', Model(UN(6, warmup_iters=2)), steps=12, resume=True, hook=hook)
    # A new run keeps the old record.
    assert len(train(tmp_path / 'parts', Model(UN(6)), steps=2).steps) == 2
    assert len(NormRecord(tmp_path / 'parts/norm_statistics.old').steps) == 9


class FailingHook(Hook):
    """Ends a run in step 8: with an error before its forward pass, or with weights that are NaN."""

    def __init__(self, error):
        self.error = error

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter + 1 >= 8:
            if self.error is ZeroDivisionError:
                shutil.rmtree(runner.work_dir)
            if self.error is not DivergenceError:
                raise self.error('here')
            with torch.no_grad():
                runner.model.fc1.weight.fill_(math.nan)


# A record that cannot be written does not hide the error.
@pytest.mark.parametrize(('error', 'last'), [
    (KeyboardInterrupt, 7), (RuntimeError, 7), (DivergenceError, 9), (ZeroDivisionError, None)])
def test_a_run_that_ends_in_an_error_keeps_what_it_recorded(tmp_path, error, last):
    def with_failing_hook(runner):
        runner.register_hook(FailingHook(error))
        runner.register_hook(dict(type='DivergenceHook', patience=3, interval=1))
        load_tool('train').train(runner)

    stopped = Interrupted, 'interrupted after step 7; --resume'
    raised, message = stopped if error is KeyboardInterrupt else (error, None)
    with pytest.raises(raised, match=message):
        train(tmp_path / 'w', Model(UN(6, warmup_iters=2)), steps=20, run=with_failing_hook)
    if last:
        record = NormRecord(tmp_path / 'w/norm_statistics')
        assert record.steps.tolist() == list(range(1, last + 1))
        assert np.isfinite(record.activation(0)[:7]).all() and np.isfinite(record.gradient(0)[:7]).all()
        assert np.isnan(record.activation(0)[7:]).all()


class KillHook(Hook):

    def after_train_iter(self, runner, *args, **kwargs):
        if runner.iter + 1 == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def train_killed(work_dir):
    def with_kill_hook(runner):
        runner.register_hook(KillHook(), priority='LOWEST')
        load_tool('train').train(runner)

    train(work_dir, Model(UN(6, warmup_iters=2)), steps=9, run=with_kill_hook)


@pytest.mark.slow
def test_a_killed_run_resumes(tmp_path):
    process = FORKSERVER.Process(target=train_killed, args=(tmp_path / 'w', ))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    record = NormRecord(tmp_path / 'w/norm_statistics')
    assert record.steps.tolist() == [1, 2, 3]  # up to the checkpoint
    record = train(tmp_path / 'w', Model(UN(6, warmup_iters=2)), steps=9, resume=True)
    assert record.steps.tolist() == list(range(1, 10))


def test_numbers_reach_the_log(tmp_path):
    record = train(tmp_path / 'w', Model(UN(6, warmup_iters=2, window=2)), steps=30, hook=dict(span=20))
    lines = [json.loads(line) for path in (tmp_path / 'w').glob('*/vis_data/scalars.json')
             for line in path.open()]
    # The last step is logged before the end of the run writes it; that of the last checkpoint is after
    # its logging too, so the newest numbers are of the checkpoint at step 27.
    last = lines[-1]
    rows = slice(7, 27)
    for field in ('activation', 'gradient'):
        percents = [pnac(getattr(record, field)(i, rows)).percent for i in (0, 1)]
        assert last[f'norm/pnac_{field}'] == pytest.approx(np.mean(percents), abs=1e-3)
    counts = record.outliers()[rows, 0]
    assert last['norm/outlier_share'] == pytest.approx((counts[-1] - counts[0]) / 19)
