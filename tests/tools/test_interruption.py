"""A run that is killed and resumed ends as one that nobody disturbed."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmunorm.cli.resume import set_resume

from .. import processes, tiny_runs

TRAIN = tiny_runs.load_tool('train')
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
DETECTOR = """
_base_ = ['{root}/configs/digits/swin_un_maskrcnn.py']
custom_imports = dict(imports=['mmunorm', 'killer'])
custom_hooks = [dict(type='KillHook')]
model = dict(backbone=dict(drop_path_rate=0.4, norm_cfg=dict(warmup_iters=1)))
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
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop('killer', None)
    (tmp_path / 'killer.py').write_text(KILLER.replace('module()', 'module(force=True)'))
    tiny_runs.skip_config_formatting(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the process that is killed: their number decides how sums are rounded
    yield
    torch.set_num_threads(threads)


def write(folder, text):
    base = tiny_runs.write_classifier(folder)
    config = folder / 'noisy.py'
    config.write_text(NOISY.format(base=base) + text)
    return config


def train(*arguments):
    tiny_runs.call(TRAIN, *arguments)


def end_of(work_dir):
    """Weights, averaged weights and optimizer at the end, and the metrics of every validation."""
    last = torch.load((work_dir / 'last_checkpoint').read_text(), weights_only=False)
    logged = [json.loads(line) for path in sorted(work_dir.glob('*/vis_data/scalars.json'))
              for line in path.open()]
    metrics = {(entry['step'], name): value for entry in logged for name, value in entry.items()
               if '/' in name}
    assert metrics
    return last['state_dict'], last.get('ema_state_dict'), last['optimizer'], metrics


def environment(config, **others):
    path = os.pathsep.join([str(tiny_runs.ROOT), str(config.parent)])
    return dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=path, **others)


def kill(config, work_dir, step, *arguments):
    status, = processes.run_tool('train', config, '--work-dir', work_dir, '--cfg-options',
                                 'train_dataloader.num_workers=0', *arguments, KILL_AFTER_STEP=str(step))
    assert status == -signal.SIGKILL


def launch(config, work_dir, *arguments, **others):
    """Two processes, started by a third."""
    with Path('launched.log').open('w') as log:
        return subprocess.Popen(
            ['bash', str(tiny_runs.ROOT / 'tools/dist_train.sh'), str(config), '2', '--work-dir', work_dir,
             *arguments], env=environment(config, **processes.without_a_gpu(), **others), stdout=log,
            stderr=log, start_new_session=True)


def kill_launched(config, work_dir, step, *arguments):
    """Kills torchrun while its processes wait after a step; they end with it."""
    with launch(config, work_dir, *arguments, KILL_AFTER_STEP=str(step)) as launched:
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
        return Path(f'/proc/{pid}/cmdline').read_bytes() != b''  # which a zombie has not
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize('text, step, saved, more', [
    pytest.param(EPOCHS, 7, 'epoch_3', [], id='epochs'),
    # Killed with half of an update's gradients gathered.
    pytest.param(ITERS.format(sampler='InfiniteSampler'), 7, 'iter_4', ['optim_wrapper.accumulative_counts=2'],
                 id='accumulation'),
    pytest.param(ITERS.format(sampler='InfiniteSampler'), 7, 'iter_4', [], marks=grid, id='infinite'),
    pytest.param(ITERS.format(sampler='DefaultSampler'), 10, 'iter_8', [], marks=grid, id='iterations'),
    pytest.param(EPOCHS, 7, 'epoch_3', ['--amp'], marks=grid, id='amp'),
    pytest.param(EPOCHS, 7, 'epoch_3', ['custom_hooks.1.ema_type=ExponentialMovingAverage'], marks=grid,
                 id='mmengines_ema')])
def test_killed_and_resumed_is_as_if_undisturbed(tmp_path, text, step, saved, more):
    config = write(tmp_path, text)
    # The data do not depend on the number of workers either.
    train(config, '--work-dir', 'whole', '--cfg-options', 'train_dataloader.num_workers=2',
          'train_dataloader.persistent_workers=False', *more)
    kill(config, 'parts', step, *more)
    assert (tmp_path / 'parts/last_checkpoint').read_text().endswith(f'{saved}.pth')
    train(config, '--work-dir', 'parts', '--resume', '--cfg-options', 'train_dataloader.num_workers=1',
          'train_dataloader.persistent_workers=False', *more)
    torch.testing.assert_close(end_of(tmp_path / 'parts'), end_of(tmp_path / 'whole'), rtol=0, atol=0)


@pytest.mark.slow
def test_a_detector_killed_and_resumed(tmp_path):
    config = tmp_path / 'detector.py'
    config.write_text(DETECTOR.format(root=tiny_runs.ROOT))
    options = ['--cfg-options', *tiny_runs.tiny_data(tiny_runs.Config.fromfile(config), tmp_path / 'data'),
               'train_cfg.max_iters=4', 'train_cfg.val_interval=2',
               'default_hooks.checkpoint.save_optimizer=True']
    # In a process of its own the pictures' random numbers do not set those of the step.
    train(config, '--work-dir', 'whole', *options, 'train_dataloader.num_workers=1')
    kill(config, 'parts', 3, *options)
    assert (tmp_path / 'parts/last_checkpoint').read_text().endswith('iter_2.pth')
    train(config, '--work-dir', 'parts', '--resume', *options)
    torch.testing.assert_close(end_of(tmp_path / 'parts'), end_of(tmp_path / 'whole'), rtol=0, atol=0)


@pytest.mark.slow
def test_two_processes_killed_and_resumed(tmp_path):
    config = write(tmp_path, EPOCHS)
    options = ['--cfg-options', 'model.backbone.norm_cfg.type=UN', 'train_dataloader.batch_size=1',
               'train_cfg.max_epochs=3']  # of two steps; SyncUN, whose ranks have the same, is the easier one
    for work_dir, resume in (('whole', []), ('parts', ['--resume'])):
        if resume:
            kill_launched(config, work_dir, 5, *options)
            assert (tmp_path / 'parts/last_checkpoint').read_text().endswith('epoch_2.pth')
        assert processes.run_tool('train', config, '--work-dir', work_dir, *resume, *options, processes=2) == [0, 0]
    torch.testing.assert_close(end_of(tmp_path / 'parts'), end_of(tmp_path / 'whole'), rtol=0, atol=0)


@pytest.mark.slow
@grid
def test_the_numbers_differ_from_step_to_step(tmp_path):
    """Or the run above would prove little: every epoch would see the same augmentation."""
    config = write(tmp_path, EPOCHS)
    losses = []
    for seed in (0, 1):
        train(config, '--work-dir', f'w{seed}', '--cfg-options', 'optim_wrapper.optimizer.lr=0.0',
              f'randomness.seed={seed}', 'model.backbone.norm_cfg.warmup_iters=1000',
              'train_cfg.max_epochs=3')
        logs = (tmp_path / f'w{seed}').glob('*/vis_data/scalars.json')
        losses += [json.loads(line)['loss'] for path in logs for line in path.open() if 'loss' in line]
    assert len(losses) == 12 and len(set(losses)) == 12


@pytest.mark.slow
def test_what_an_interruption_leaves_behind(tmp_path, capsys):
    config = write(tmp_path, EPOCHS)
    resume = ('--work-dir', 'w', '--resume', '--cfg-options')
    train(config, *resume, 'train_cfg.max_epochs=2')
    assert 'no checkpoint in w to resume from: the run starts at the beginning' in capsys.readouterr().err
    work_dir = tmp_path / 'w'

    # Killed between the checkpoint and `last_checkpoint`, and the other way about.
    for pointer in (str(work_dir / 'epoch_1.pth'), '', None):
        if pointer is None:
            (work_dir / 'last_checkpoint').unlink()
        else:
            (work_dir / 'last_checkpoint').write_text(pointer)
        cfg = tiny_runs.Config(dict(work_dir='w', resume=True, model={}))
        set_resume(cfg, 'auto')
        assert os.path.samefile(cfg.load_from, work_dir / 'epoch_2.pth')

    # Killed while a checkpoint was written.
    whole = (work_dir / 'epoch_2.pth').read_bytes()
    for size in (0, 1000, len(whole) // 2, len(whole) - 1):
        (work_dir / 'epoch_3.pth').write_bytes(whole[:size])
        cfg = tiny_runs.Config(dict(work_dir='w', resume=True, model={}))
        set_resume(cfg, 'auto')
        assert os.path.samefile(cfg.load_from, work_dir / 'epoch_2.pth')
        assert 'epoch_3.pth was not written to its end: resuming from' in capsys.readouterr().err
    train(config, *resume, 'train_cfg.max_epochs=3')
    assert torch.load(work_dir / 'epoch_3.pth', weights_only=False)['meta']['epoch'] == 3

    # A longer run of before must not be taken for the latest.
    shutil.copyfile(work_dir / 'epoch_3.pth', work_dir / 'epoch_9.pth')
    os.utime(work_dir / 'epoch_9.pth', (1, 1))
    cfg = tiny_runs.Config(dict(work_dir='w', resume=True, model={}))
    set_resume(cfg, 'auto')
    assert os.path.samefile(cfg.load_from, work_dir / 'epoch_3.pth')
