import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from mmengine.logging import MessageHub
from torch import nn

from mmunorm.engine import DivergenceError, DivergenceHook
from mmunorm.engine.divergence import LAST_GOOD, RECORD
from mmunorm.norms import UN

from .. import tiny_runs

TRAIN = tiny_runs.load_tool('train')


class Model(nn.Module):
    """Three norms in a row, executed in another order than they are registered."""

    def __init__(self):
        super().__init__()
        self.last = nn.LayerNorm(4)
        self.first = nn.LayerNorm(4)
        self.middle = UN(4)
        self.scales = dict(first=1.0, middle=1.0, last=1.0)

    def forward(self, x):
        for name in ('first', 'middle', 'last'):
            x = getattr(self, name)(x)
            with torch.no_grad():
                getattr(self, name).bias.fill_(self.scales[name] - 1)
        return x


@pytest.fixture
def runner(tmp_path, request):
    errors = []
    return SimpleNamespace(
        model=Model(), work_dir=str(tmp_path), iter=0, max_iters=1000, hooks=[],
        message_hub=MessageHub(f'hub_{request.node.name}'), optim_wrapper=SimpleNamespace(),
        logger=SimpleNamespace(error=errors.append), errors=errors)


def go(hook, runner, losses, scales=None):
    """One step for each loss; `scales` is {step: {layer: bias + 1}}, as biases move before the next step."""
    for loss in losses:
        runner.model.scales.update((scales or {}).get(runner.iter + 1, {}))
        runner.model(torch.ones(2, 4))
        hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(loss)))
        runner.iter += 1


@pytest.mark.parametrize('interval', [1, 3, 100])
@pytest.mark.parametrize(('loss', 'text'), [(math.nan, 'the loss is nan'), (math.inf, 'the loss is inf'),
                                            (6.1, 'more than 3 times the 2 of the start')])
def test_stops_at_the_first_bad_step(runner, interval, loss, text, tmp_path):
    hook = DivergenceHook(patience=3, interval=interval)
    hook.before_train(runner)
    with pytest.raises(DivergenceError, match=f'step 7: .*{text}'):
        go(hook, runner, [1.0, 2.0, 3.0, 5.9, loss, 5.0] + [loss] * 5)
        hook.after_train_epoch(runner)
    record = json.loads((tmp_path / RECORD).read_text())
    assert record['step'] == 7 and record['start_loss'] == 2.0 and record['checkpoint'] is None
    assert record['loss'] == (pytest.approx(loss) if math.isfinite(loss) else None)
    assert record['message'] == runner.errors[0]


def test_a_run_that_recovers_goes_on(runner, tmp_path):
    hook = DivergenceHook(patience=3, interval=2)
    hook.before_train(runner)
    go(hook, runner, [2.0] * 3 + [math.nan, 9.0, 1.0] * 20)
    hook.after_train_epoch(runner)
    assert not (tmp_path / RECORD).exists()


def test_an_explosion_among_the_first_steps(runner):
    hook = DivergenceHook(patience=10)
    hook.before_train(runner)
    with pytest.raises(DivergenceError, match='step 5: the loss is 1e.06, more than 3 times the 2.3'):
        go(hook, runner, [2.3] * 4 + [1e6] * 40)


@pytest.mark.parametrize(('last', 'stops'), [(math.nan, True), (100.0, False)])
def test_a_run_that_ends_in_bad_steps(runner, last, stops, tmp_path):
    hook = DivergenceHook(patience=10, interval=1)
    hook.before_train(runner)
    go(hook, runner, [2.3] * 20 + [last] * 4)
    if stops:
        with pytest.raises(DivergenceError, match='step 21: the loss is nan.* 4 steps in a row'):
            hook.after_train(runner)
    else:
        hook.after_train(runner)
    assert (tmp_path / RECORD).exists() == stops


def test_names_the_first_layer_in_the_order_of_execution(runner, tmp_path):
    hook = DivergenceHook(patience=2, interval=1)
    hook.before_train(runner)
    with pytest.raises(DivergenceError, match='non-finite output is middle'):
        go(hook, runner, [1.0] * 10, {4: dict(middle=math.inf)})
    assert json.loads((tmp_path / RECORD).read_text())['layer'] == 'middle'


def test_names_the_layer_that_has_grown_most(runner, tmp_path):
    hook = DivergenceHook(patience=2, interval=4)
    hook.before_train(runner)
    scales = {2: dict(first=1.5, middle=1.5, last=1.5), 5: dict(first=3.0, last=90.0)}
    with pytest.raises(DivergenceError, match='the output of last has grown most'):
        go(hook, runner, [1.0] * 5 + [50.0] * 3, scales)
    assert json.loads((tmp_path / RECORD).read_text())['layer'] == 'last'


def test_the_last_good_checkpoint_outlives_the_next_save(runner, tmp_path):
    hook = DivergenceHook(patience=5, interval=1)
    hook.before_train(runner)
    good = tmp_path / 'iter_4.pth'
    good.write_text('good')
    runner.message_hub.update_info('last_ckpt', str(good))
    go(hook, runner, [1.0] * 6)
    assert not (tmp_path / LAST_GOOD).exists()
    go(hook, runner, [math.nan] * 2)
    # What a CheckpointHook of max_keep_ckpts=1 does now.
    good.unlink()
    (tmp_path / 'iter_8.pth').write_text('bad')
    runner.message_hub.update_info('last_ckpt', str(tmp_path / 'iter_8.pth'))
    with pytest.raises(DivergenceError, match=LAST_GOOD):
        go(hook, runner, [math.nan] * 3)
    assert (tmp_path / LAST_GOOD).read_text() == 'good'


def test_the_start_is_remembered_by_a_resumed_run(runner):
    hook = DivergenceHook(patience=2)
    hook.before_train(runner)
    go(hook, runner, [1.0] * 4)
    hook.after_train_epoch(runner)
    # The hub's state is what a checkpoint holds.
    state = runner.message_hub.state_dict()
    runner.message_hub = MessageHub('resumed')
    runner.message_hub.load_state_dict(state)
    resumed = DivergenceHook(patience=2)
    resumed.before_train(runner)
    with pytest.raises(DivergenceError, match='more than 3 times the 1 of the start'):
        go(resumed, runner, [4.0] * 20)


def test_advice_fits_the_run(runner):
    runner.model.middle = UN(4, outlier_filter=False)
    hook = DivergenceHook(patience=1, interval=1)
    hook.before_train(runner)
    with pytest.raises(DivergenceError, match='filter on .*clip gradients .*learning rate.*warmup_iters'):
        go(hook, runner, [math.nan])


def test_hooks_are_removed_and_evaluation_is_not_watched(runner):
    hook = DivergenceHook()
    hook.before_train(runner)
    runner.model.eval()(torch.ones(2, 4))
    assert not hook._peaks
    hook.after_train(runner)
    runner.model.train()(torch.ones(2, 4))
    assert not hook._peaks


@pytest.mark.parametrize(('arguments', 'text'), [
    (dict(patience=0), 'patience'), (dict(interval=0.5), 'interval'),
    (dict(factor=1), 'factor must be more than 1, got 1')])
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        DivergenceHook(**arguments)


def test_a_real_run_ends_with_one_line_and_status_3(tmp_path, monkeypatch, capsys):
    tiny_runs.skip_config_formatting(monkeypatch)
    config = tiny_runs.write_classifier(tmp_path)
    config.write_text(config.read_text() + "custom_hooks = [dict(type='DivergenceHook', patience=2)]\n")
    work_dir = tmp_path / 'work'
    with pytest.raises(SystemExit) as stop:
        # The first step's update throws the weights out of float32.
        tiny_runs.call(TRAIN, config, '--work-dir', work_dir, '--cfg-options', 'train_cfg.max_epochs=6',
                       'optim_wrapper.optimizer.lr=1e30', 'default_hooks.checkpoint.max_keep_ckpts=1')
    assert stop.value.code == 3
    printed = capsys.readouterr().err
    assert 'error: the run diverged at step ' in printed.splitlines()[-1]
    record = json.loads((work_dir / RECORD).read_text())
    assert record['step'] <= 3 and record['layer'].startswith('backbone.')
    assert not list(work_dir.glob('epoch_[3-6].pth'))


RANK = """
import sys
import torch
from types import SimpleNamespace
from mmengine.logging import MessageHub
from torch import nn
from mmunorm.engine import DivergenceError, DivergenceHook

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group('gloo', init_method=f'file://{folder}/store', rank=rank, world_size=2)
runner = SimpleNamespace(
    model=nn.Sequential(nn.LayerNorm(2)), work_dir=folder, iter=0, max_iters=99, hooks=[],
    message_hub=MessageHub('hub'), optim_wrapper=None, logger=SimpleNamespace(error=print))
hook = DivergenceHook(patience=2, interval=5)
hook.before_train(runner)
try:
    for runner.iter in range(20):
        runner.model(torch.ones(1, 2))
        bad = rank == 1 and runner.iter >= 6
        hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(float('nan') if bad else 1.0)))
except DivergenceError as error:
    print(f'stopped at {runner.iter}', error)
"""


@pytest.mark.slow
def test_all_processes_stop_at_the_same_step(tmp_path):
    """Also those whose own loss is fine: they would wait for the others for ever."""
    (tmp_path / 'rank.py').write_text(RANK)
    env = {**os.environ, 'PYTHONPATH': str(tiny_runs.ROOT)}
    processes = [subprocess.Popen([sys.executable, tmp_path / 'rank.py', str(rank), tmp_path],
                                  env=env, text=True, stdout=subprocess.PIPE) for rank in range(2)]
    for process in processes:
        assert 'stopped at 9 the run diverged at step 7' in process.communicate(timeout=300)[0]
    assert json.loads((tmp_path / RECORD).read_text())['step'] == 7
