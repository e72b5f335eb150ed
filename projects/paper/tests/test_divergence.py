import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import CheckpointHook
from mmengine.logging import MessageHub
from torch import nn

from mmunorm.norms import UN
from projects.paper.paper.divergence import RECORD, DivergenceError, DivergenceHook
from tests import processes, tiny_runs
from tests.versions import compiles_as_one_graph


class Model(nn.Module):
    """Three norms in a row, executed in another order than they are registered."""

    def __init__(self):
        super().__init__()
        self.last = nn.LayerNorm(4)
        self.first = nn.LayerNorm(4)
        self.middle = UN(4)
        self.broken = None

    def forward(self, x):
        for name in ('first', 'middle', 'last'):
            x = getattr(self, name)(x * math.nan if name == self.broken else x)
        return x


def make_runner(work_dir, model):
    errors = []
    return SimpleNamespace(model=model, work_dir=str(work_dir), iter=0, max_iters=1000, hooks=[],
                           message_hub=MessageHub('hub'), logger=SimpleNamespace(error=errors.append), errors=errors)


@pytest.fixture
def runner(tmp_path):
    return make_runner(tmp_path, Model())


def begin(runner, **arguments):
    hook = DivergenceHook(**arguments)
    hook.before_train(runner)
    return hook


def run_losses(hook, runner, losses):
    """One step for each loss; a layer is not finite while the loss is not."""
    for loss in losses:
        runner.model.broken = 'middle' if math.isnan(loss) else None
        runner.model(torch.ones(2, 4))
        hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(loss)))
        runner.iter += 1


def test_a_norm_that_is_called_twice_is_as_bad_as_its_worse_call(runner):
    hook = begin(runner, patience=1)
    for value in (1., math.nan, 1.):
        runner.model.middle(torch.full((2, 4), value))
    runner.model.last(torch.full((2, 4), math.nan))
    hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(math.nan)))
    with pytest.raises(DivergenceError, match='an output that is not finite is middle'):
        hook.after_train_epoch(runner)


@pytest.mark.parametrize(('loss', 'text', 'interval'), [
    (math.nan, 'the loss is nan; the first norm layer with an output that is not finite is middle', 3),
    (math.inf, 'the loss is inf', 100), (6.1, 'more than 3 times the 2 of the start', 1)])
def test_stops_at_the_first_bad_step(runner, interval, loss, text, tmp_path):
    hook = begin(runner, patience=3, factor=3.0, interval=interval)
    with pytest.raises(DivergenceError, match=f'step 7: .*{text}'):
        run_losses(hook, runner, [1.0, 2.0, 3.0, 5.9, loss, 5.0] + [loss] * 5)
        hook.after_train_epoch(runner)
    record = json.loads((tmp_path / RECORD).read_text())
    assert record['step'] == 7 and record['start_loss'] == 2.0 and record['checkpoint'] is None
    assert record['loss'] == (pytest.approx(loss) if math.isfinite(loss) else None)
    assert record['layer'] == ('middle' if math.isnan(loss) else None)
    assert record['message'] == runner.errors[0]


def test_a_run_that_recovers_continues(runner, tmp_path):
    """As under a loss scale, which skips a step that overflows. Without `factor`, any finite loss is good."""
    hook = begin(runner, patience=3, interval=2)
    run_losses(hook, runner, [2.0] * 3 + [math.nan, 1e6, 1.0] * 20 + [math.nan] * 2)
    hook.after_train_epoch(runner)
    hook.after_train(runner)
    assert not (tmp_path / RECORD).exists()


@pytest.mark.parametrize('when, broken', [
    ('step', 'last.weight'), ('epoch', 'middle.running_var'), ('validation', 'last.weight')])
def test_non_finite_weights_are_never_saved(runner, when, broken):
    """Even if the loss of that step was finite, and patience is left."""
    runner.hooks = [CheckpointHook(interval=5, by_epoch=when != 'step')]
    hook = DivergenceHook()
    hook.before_val_epoch(runner)  # outside of training it checks nothing
    hook.before_train(runner)
    runner.message_hub.update_info('last_ckpt', 'iter_2.pth')
    run_losses(hook, runner, [1.0] * 4)
    runner.model.state_dict()[broken][0] = math.inf
    with pytest.raises(DivergenceError, match='at step 5: weights or statistics are not finite. '
                       'The last checkpoint is iter_2.pth'):
        run_losses(hook, runner, [1.0])
        assert when != 'step'
        (hook.after_train_epoch if when == 'epoch' else hook.before_val_epoch)(runner)
    assert json.loads(Path(runner.work_dir, RECORD).read_text())['loss'] is None


def test_a_compiled_model_is_one_graph(runner):
    hook = begin(runner, patience=2, interval=1)
    compiled = torch.compile(runner.model.last, backend='eager', fullgraph=compiles_as_one_graph())
    # A release with a graph break at the norm names it.
    layer = '' if compiles_as_one_graph() else '; the first norm layer .* is last'
    with pytest.raises(DivergenceError, match=f'step 1: the loss is nan{layer}; 2 steps'):
        for runner.iter in range(2):
            compiled(torch.full((2, 4), math.nan))
            hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(math.nan)))


def test_the_start_is_remembered_by_a_resumed_run(runner):
    hook = begin(runner, patience=2)
    run_losses(hook, runner, [1.0] * 4)
    hook.after_train_epoch(runner)
    # A checkpoint has the hub's state.
    state = runner.message_hub.state_dict()
    runner.message_hub = MessageHub('resumed')
    runner.message_hub.load_state_dict(state)
    hook = begin(runner, patience=2, factor=3.0, interval=1)
    with pytest.raises(DivergenceError, match='step 5: the loss is 4, more than 3 times the 1 of the start'):
        run_losses(hook, runner, [4.0] * 3)


@pytest.mark.parametrize(('arguments', 'text'), [
    (dict(patience=0), 'patience'), (dict(interval=0), 'interval'),
    (dict(factor=1.0), 'factor must be a finite number above 1'), (dict(factor=float('inf')), 'finite')])
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        DivergenceHook(**arguments)


def test_a_real_run_records_where_it_diverged(in_a_folder, tmp_path):
    config = tiny_runs.write_classifier(tmp_path)
    config.write_text(config.read_text() + "custom_hooks = [dict(type='DivergenceHook')]\n"
                      "custom_imports = dict(imports=['projects.paper.paper'])\n")
    with pytest.raises(SystemExit) as stop:
        # The first update overflows the weights.
        tiny_runs.call('train', config, '--work-dir', 'work', '--cfg-options', 'train_cfg.max_epochs=8',
                       'optim_wrapper.optimizer.lr=1e30')
    assert stop.value.code == 3
    record = json.loads((tmp_path / 'work' / RECORD).read_text())
    assert record['step'] <= 3 and record['layer'].startswith('backbone.')


def diverge(rank, folder):
    """A loop whose loss is bad in the second process alone; returns its error."""
    runner = make_runner(folder, nn.Sequential(nn.LayerNorm(2)))
    hook = begin(runner, patience=2, interval=5)
    try:
        for runner.iter in range(20):
            runner.model(torch.ones(1, 2))
            bad = rank == 1 and runner.iter >= 6
            hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(float('nan') if bad else 1.0)))
    except DivergenceError as error:
        return f'stopped at {runner.iter} {error}'


@pytest.mark.slow
def test_all_processes_stop_at_the_same_step(tmp_path):
    """Also those with a finite loss, which would otherwise wait forever."""
    ended = processes.run(diverge, tmp_path)
    assert 'stopped at 9 the run diverged at step 7' in ended[0]
    assert ended[1] == ended[0]  # though the first process alone writes
    assert json.loads((tmp_path / RECORD).read_text())['step'] == 7
