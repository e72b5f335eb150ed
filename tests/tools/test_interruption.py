"""A killed and resumed run ends like an uninterrupted one."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from .. import processes, tiny_runs

pytestmark = pytest.mark.slow
grid = pytest.mark.grid

# Everything that draws random numbers: augmentation, drop path, dropout, shuffling.
NOISY = """
_base_ = ['{base}']
custom_imports = dict(imports=['mmunorm', 'killer'])
custom_hooks = [dict(type='KillHook'), dict(type='EMAHook', ema_type='BufferedEMA', momentum=0.2)]
model = dict(backbone=dict(drop_path_rate=0.4, drop_rate=0.1, norm_cfg=dict(warmup_iters=3)))
pipeline = [dict(type='LoadImageFromFile'), dict(type='RandomResizedCrop', scale=32),
            dict(type='ColorJitter', brightness=0.9), dict(type='PackInputs')]
train_dataloader = dict(dataset=dict(pipeline=pipeline))
optim_wrapper = dict(_delete_=True, optimizer=dict(type='AdamW', lr=0.01))
param_scheduler = dict(type='CosineAnnealingLR', by_epoch=False, T_max=12)
"""
ITERS = """
train_dataloader = dict(sampler=dict(_delete_=True, type='{sampler}', shuffle=True))
train_cfg = dict(_delete_=True, by_epoch=False, max_iters=12, val_interval=4)
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=4), logger=dict(interval=1))
"""
EPOCHS = """
train_cfg = dict(max_epochs=6)
default_hooks = dict(logger=dict(interval=1))
"""
KILLER = """
import os
import signal
import time
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class KillHook(Hook):

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == int(os.environ.get('KILL_AFTER_STEP', 0)):
            if get_world_size() > 1:  # to be killed with its launcher
                open(f'pid_{get_rank()}_{os.getpid()}', 'w').close()
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _killer(in_a_folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop('killer', None)
    (tmp_path / 'killer.py').write_text(KILLER.replace('module()', 'module(force=True)'))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the process that is killed: their number decides how sums are rounded
    yield
    torch.set_num_threads(threads)


def write(text):
    config = Path('noisy.py').resolve()
    config.write_text(text)
    return config


def train(*arguments):
    tiny_runs.call('train', *arguments)


def end_of(work_dir):
    """Weights, averaged weights and optimizer at the end, and the metrics of every validation."""
    last = tiny_runs.checkpoint(Path(work_dir, 'last_checkpoint').read_text())
    metrics = {(entry['step'], name): value for entry in tiny_runs.scalars(work_dir)
               for name, value in entry.items() if '/' in name}
    assert metrics
    return last['state_dict'], last.get('ema_state_dict'), last['optimizer'], metrics


def assert_ends_as_undisturbed():
    torch.testing.assert_close(end_of('parts'), end_of('whole'), rtol=0, atol=0)


def kill(config, step, last, *arguments):
    """Kills a run in `parts` after a step; its last checkpoint is the named one."""
    status, = processes.run_tool('train', config, '--work-dir', 'parts', '--cfg-options',
                                 'train_dataloader.num_workers=0', *arguments, KILL_AFTER_STEP=str(step))
    assert status == -signal.SIGKILL
    assert Path('parts/last_checkpoint').read_text().endswith(f'{last}.pth')


def kill_launched(config, step, *arguments):
    """Kills torchrun while its two processes wait after a step; they end with it."""
    path = os.pathsep.join([str(tiny_runs.ROOT), str(config.parent)])
    environment = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=path, KILL_AFTER_STEP=str(step),
                       **processes.without_a_gpu())
    command = ['bash', str(tiny_runs.ROOT / 'tools/dist_train.sh'), str(config), '2', '--work-dir', 'parts', *arguments]
    with Path('launched.log').open('w') as log, subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True) as launched:
        try:
            while len(waiting := list(Path().glob('pid_*'))) < 2:
                assert launched.poll() is None, Path('launched.log').read_text()
                time.sleep(0.1)
        finally:
            os.killpg(launched.pid, signal.SIGKILL)
    pids = [int(path.name.rpartition('_')[2]) for path in waiting]
    deadline = time.monotonic() + 60
    while left := list(filter(is_running, pids)):
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail('the processes have outlived torchrun')
        time.sleep(0.1)


def is_running(pid):
    try:
        return Path(f'/proc/{pid}/cmdline').read_bytes() != b''  # a zombie has none
    except OSError:
        return False


@pytest.mark.parametrize('text, step, saved, more', [
    # Killed with half of an update's gradients gathered.
    pytest.param(ITERS.format(sampler='InfiniteSampler'), 7, 'iter_4', ['optim_wrapper.accumulative_counts=2'],
                 id='accumulation'),
    pytest.param(ITERS.format(sampler='InfiniteSampler'), 7, 'iter_4', [], marks=grid, id='infinite'),
    pytest.param(ITERS.format(sampler='DefaultSampler'), 10, 'iter_8', [], marks=grid, id='iterations'),
    pytest.param(EPOCHS, 7, 'epoch_3', [], marks=grid, id='epochs'),
    pytest.param(EPOCHS, 7, 'epoch_3', ['--amp'], marks=grid, id='amp'),
    pytest.param(EPOCHS, 7, 'epoch_3', ['custom_hooks.1.ema_type=ExponentialMovingAverage'], marks=grid,
                 id='mmengines_ema')])
def test_killed_and_resumed_is_as_if_undisturbed(classifier, text, step, saved, more):
    config = write(NOISY.format(base=classifier[0]) + text)
    # The data do not depend on the number of workers either.
    train(config, '--work-dir', 'whole', '--cfg-options', 'train_dataloader.num_workers=2',
          'train_dataloader.persistent_workers=False', *more)
    kill(config, step, saved, *more)
    train(config, '--work-dir', 'parts', '--resume', '--cfg-options', 'train_dataloader.num_workers=1',
          'train_dataloader.persistent_workers=False', *more)
    assert_ends_as_undisturbed()


@pytest.mark.grid
def test_two_processes_killed_and_resumed(classifier):
    config = write(NOISY.format(base=classifier[0]) + EPOCHS)
    options = ['--cfg-options', 'model.backbone.norm_cfg.type=UN', 'train_dataloader.batch_size=1',
               'train_cfg.max_epochs=3']  # of two steps; SyncUN, whose ranks have the same, is the easier one
    for work_dir, resume in (('whole', []), ('parts', ['--resume'])):
        if resume:
            kill_launched(config, 5, *options)
            assert Path('parts/last_checkpoint').read_text().endswith('epoch_2.pth')
        assert processes.run_tool('train', config, '--work-dir', work_dir, *resume, *options, processes=2) == [0, 0]
    assert_ends_as_undisturbed()


@grid
def test_the_numbers_differ_from_step_to_step(classifier):
    """Or the run above would prove little: every epoch would see the same augmentation."""
    config = write(NOISY.format(base=classifier[0]) + EPOCHS)
    losses = []
    for seed in (0, 1):
        train(config, '--work-dir', f'w{seed}', '--cfg-options', 'optim_wrapper.optimizer.lr=0.0',
              f'randomness.seed={seed}', 'model.backbone.norm_cfg.warmup_iters=1000',
              'train_cfg.max_epochs=3')
        losses += [entry['loss'] for entry in tiny_runs.scalars(f'w{seed}') if 'loss' in entry]
    assert len(losses) == 12 and len(set(losses)) == 12
