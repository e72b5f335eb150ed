import math
from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import CheckpointHook
from mmengine.logging import MessageHub
from torch import nn

from mmunorm.engine import DivergenceError, DivergenceHook

from .. import tiny_runs


@pytest.fixture
def runner():
    return SimpleNamespace(model=nn.LayerNorm(4), iter=0, max_iters=1000, hooks=[], message_hub=MessageHub('hub'),
                           logger=SimpleNamespace(error=lambda message: None))


def train(hook, runner, losses):
    for loss in losses:
        hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(loss)))
        runner.iter += 1


@pytest.mark.parametrize(('loss', 'interval'), [(math.nan, 3), (-math.inf, 100)])
def test_a_loss_that_is_not_finite_stops_the_run(runner, loss, interval):
    hook = DivergenceHook(patience=3, interval=interval)
    hook.before_train(runner)
    train(hook, runner, [1.0, 2.0, loss, loss, 1e9])  # as under a loss scale, which skips a step that overflows
    with pytest.raises(DivergenceError, match=f'step 6: the loss is {loss}; 3 steps in a row .* No checkpoint was'):
        train(hook, runner, [loss] * 4)
        hook.after_train_epoch(runner)


@pytest.mark.parametrize('when', ['step', 'epoch', 'validation'])
def test_weights_that_are_not_finite_are_never_saved(runner, when):
    """Even if the loss of that step was finite, and patience is left."""
    runner.hooks = [CheckpointHook(interval=5, by_epoch=when != 'step')]
    hook = DivergenceHook()
    hook.before_val_epoch(runner)  # outside of a training it checks nothing
    hook.before_train(runner)
    runner.message_hub.update_info('last_ckpt', 'iter_2.pth')
    train(hook, runner, [1.0] * 4)
    runner.model.weight.data[0] = math.inf
    with pytest.raises(DivergenceError, match='at step 5: weights or statistics are not finite. '
                       'The last checkpoint is iter_2.pth'):
        train(hook, runner, [1.0])
        assert when != 'step'
        (hook.after_train_epoch if when == 'epoch' else hook.before_val_epoch)(runner)


@pytest.mark.parametrize('name', ['patience', 'interval'])
def test_wrong_arguments(name):
    with pytest.raises(ValueError, match=name):
        DivergenceHook(**{name: 0})


def test_a_real_run_ends_with_one_line_and_status_3(in_a_folder, tmp_path, capsys):
    """Though its config does not name the hook."""
    config = tiny_runs.write_classifier(tmp_path)
    with pytest.raises(SystemExit) as stop:
        # The first update overflows the weights.
        tiny_runs.call('train', config, '--work-dir', 'work', '--cfg-options', 'train_cfg.max_epochs=8',
                       'optim_wrapper.optimizer.lr=1e30', 'default_hooks.checkpoint.max_keep_ckpts=1')
    assert stop.value.code == 3
    assert 'error: the run diverged at step ' in capsys.readouterr().err.splitlines()[-1]
    checkpoints = [torch.load(path, weights_only=False)['state_dict'] for path in tmp_path.glob('work/epoch_*.pth')]
    assert all(value.isfinite().all() for weights in checkpoints for value in weights.values())
