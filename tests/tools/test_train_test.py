import json
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from mmengine.config import Config

from .. import processes, tiny_runs

TRAIN, TEST = tiny_runs.load_tool('train'), tiny_runs.load_tool('test')


pytestmark = pytest.mark.usefixtures('in_a_folder')


@pytest.fixture
def classifier(tmp_path):
    return tiny_runs.write_classifier(tmp_path)


def train(*arguments):
    tiny_runs.call(TRAIN, *arguments)


def run_test(*arguments):
    return tiny_runs.call(TEST, *arguments)


def error_of(capsys, tool, *arguments):
    with pytest.raises(SystemExit) as stop:
        tiny_runs.call(tool, *arguments)
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith('error: ') and printed.count('\n') == 1
    return printed


def scalars(work_dir):
    return [json.loads(line) for path in sorted(work_dir.glob('*/vis_data/scalars.json'))
            for line in path.open()]


def test_trains_into_work_dirs_and_is_tested(classifier, tmp_path):
    train(classifier, '--cfg-options', 'train_cfg.max_epochs=3')
    work_dir = tmp_path / 'work_dirs/classifier'
    assert (work_dir / 'last_checkpoint').read_text().endswith('epoch_3.pth')
    metrics = run_test(classifier, 'work_dirs/classifier/epoch_3.pth')
    assert metrics['accuracy/top1'] == scalars(work_dir)[-1]['accuracy/top1'] == 100


@pytest.mark.slow
def test_resume_goes_on_where_a_run_stopped(classifier, tmp_path):
    def state(path):
        checkpoint = torch.load(path, map_location='cpu', weights_only=False)
        return checkpoint['meta']['epoch'], checkpoint['state_dict']

    train(classifier, '--work-dir', 'whole', '--cfg-options', 'train_cfg.max_epochs=3')
    train(classifier, '--work-dir', 'parts', '--cfg-options', 'train_cfg.max_epochs=2')
    train(classifier, '--work-dir', 'parts', '--resume', '--cfg-options', 'train_cfg.max_epochs=3')
    # From a checkpoint that is named, into another folder.
    train(classifier, '--work-dir', 'other', '--resume', 'parts/epoch_2.pth', '--cfg-options',
          'train_cfg.max_epochs=3')
    epoch, whole = state('whole/epoch_3.pth')
    for folder in ('parts', 'other'):
        resumed_epoch, resumed = state(f'{folder}/epoch_3.pth')
        assert resumed_epoch == epoch == 3
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not (tmp_path / 'other/epoch_2.pth').exists()


@pytest.mark.slow
def test_resume_without_a_seed_shuffles_on(classifier):
    """mmengine builds the sampler, with a seed of the new process, before it reads that of the checkpoint."""
    options = ['--cfg-options', 'randomness.seed=None']
    train(classifier, '--work-dir', 'parts', *options)
    train(classifier, '--work-dir', 'parts', '--resume', *options, 'train_cfg.max_epochs=6')
    parts = torch.load('parts/epoch_6.pth', map_location='cpu', weights_only=False)
    train(classifier, '--work-dir', 'whole', '--cfg-options', f'randomness.seed={parts["meta"]["seed"]}',
          'train_cfg.max_epochs=6')
    whole = torch.load('whole/epoch_6.pth', map_location='cpu', weights_only=False)
    torch.testing.assert_close(parts['state_dict'], whole['state_dict'], rtol=0, atol=0)


def test_amp_and_auto_scale_lr(classifier, tmp_path):
    train(classifier, '--work-dir', 'w', '--amp', '--auto-scale-lr')
    cfg = Config.fromfile(tmp_path / 'w/classifier.py')
    wrapper = 'AmpOptimWrapper' if torch.cuda.is_available() else 'BFloat16OptimWrapper'
    assert cfg.optim_wrapper.type == wrapper
    # The config's 0.1 is for a batch of 8; this is one of 2.
    assert [entry['lr'] for entry in scalars(tmp_path / 'w') if 'lr' in entry] == [pytest.approx(0.025)]


@pytest.mark.slow
def test_out_and_show_dir_of_a_detector(tmp_path):
    config, options = tiny_runs.write_detector(tmp_path)
    train(config, '--work-dir', 'w', '--cfg-options', *options)
    run_test(config, 'w/epoch_1.pth', '--work-dir', 'w', '--out', 'predictions.pkl', '--show-dir',
             'pictures', '--cfg-options', *options)
    with open('predictions.pkl', 'rb') as file:
        predictions = pickle.load(file)
    assert [len(item['pred_instances']['scores']) for item in predictions] == [5, 5]
    assert {'counts', 'size'} == set(predictions[0]['pred_instances']['masks'][0])
    assert len(list(tmp_path.glob('w/*/pictures/*.jpg'))) == 2


@pytest.mark.slow
def test_a_detector_starts_from_a_classifier_and_without(tmp_path, capsys):
    config, options = tiny_runs.write_detector(tmp_path)
    arguments = ['--cfg-options', *options]
    # The narrow detector has no `pretrained` of its own that fits.
    message = error_of(capsys, TRAIN, config, *arguments[:-1], 'pretrained=gone.pth')
    assert 'no file gone.pth' in message and 'pretrained=None' in message

    torch.manual_seed(1)
    weight = torch.randn(12, 3, 4, 4)
    torch.save(dict(state_dict={'backbone.patch_embed.projection.weight': weight}), 'weights.pth')
    frozen = 'optim_wrapper.optimizer.lr=0.0'
    train(config, '--work-dir', 'w', *arguments[:-1], 'pretrained=weights.pth', frozen)
    state = torch.load('w/epoch_1.pth', map_location='cpu', weights_only=False)['state_dict']
    assert torch.equal(state['backbone.patch_embed.projection.weight'], weight)


def test_missing_imagenet_weights_are_told_of_before_a_model_is_built(tmp_path, monkeypatch, capsys):
    config = tiny_runs.ROOT / 'configs/swin_t_un_maskrcnn_3x.py'
    options = tiny_runs.tiny_data(Config.fromfile(config), tmp_path / 'coco')
    monkeypatch.setattr(TRAIN.training, 'build_runner', lambda cfg: pytest.fail('a model was built'))
    message = error_of(capsys, TRAIN, config, '--cfg-options',
                       *(option for option in options if option != 'pretrained=None'))
    assert 'work_dirs/swin_t_un_imagenet/epoch_300.pth' in message
    assert re.search(r'`python tools/train.py \S*configs/swin_t_un_imagenet.py`', message)
    assert '`--cfg-options pretrained=None`' in message


@pytest.mark.parametrize('config, source', [
    ('swin_t_un_maskrcnn_3x', 'cocodataset.org'), ('t2t_vit_14_un_imagenet', 'image-net.org'),
    ('t2t_vit_14_un_cifar100', 'cifar-100-python.tar.gz'), ('digits/swin_un_maskrcnn', 'tools/dataset/make_digits.py')])
def test_missing_data_is_told_of_before_a_model_is_built(config, source, tmp_path, monkeypatch, capsys):
    for tool in (TRAIN, TEST):
        monkeypatch.setattr(tool.training, 'build_runner', lambda cfg: pytest.fail('a model was built'))
    path = tiny_runs.ROOT / f'configs/{config}.py'
    (tmp_path / 'epoch_1.pth').write_text('')
    for arguments in ((TRAIN, path), (TEST, path, 'epoch_1.pth')):
        message = error_of(capsys, *arguments)
        assert source in message and re.search(r'no (file|folder) data/', message)


def test_other_mistakes_are_one_line(classifier, capsys):
    (classifier.parent / 'broken.py').write_text('model = dict(\n')
    assert 'no config file nowhere.py' in error_of(capsys, TRAIN, 'nowhere.py')
    assert 'yntax' in error_of(capsys, TRAIN, 'broken.py')
    assert 'no checkpoint nowhere.pth' in error_of(capsys, TEST, classifier, 'nowhere.pth')
    assert 'no checkpoint nowhere.pth' in error_of(capsys, TRAIN, classifier, '--resume', 'nowhere.pth')
    (classifier.parent / 'w').mkdir()
    for tool, arguments in ((TEST, ['w']), (TRAIN, ['--resume', 'w'])):
        assert 'w is a folder: a checkpoint is a file' in error_of(capsys, tool, classifier, *arguments)
    norm = 'model.backbone.norm_cfg.type=UNX'
    assert "no norm 'UNX'" in error_of(capsys, TRAIN, classifier, '--cfg-options', norm)


def test_a_hook_that_cannot_record_is_one_line(classifier, capsys):
    classifier.write_text(classifier.read_text()
                          + "custom_hooks = [dict(type='NormStatisticsHook', layers=['typo'])]\n")
    with pytest.raises(SystemExit) as stop:
        train(classifier)
    last = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    assert last.startswith("error: NormStatisticsHook: layers: no norm has a name with 'typo' in it; the ")


def test_out_must_be_a_pickle(capsys):
    with pytest.raises(SystemExit):
        run_test('a.py', 'b.pth', '--out', 'c.json')
    assert '--out takes a .pkl file, got c.json' in capsys.readouterr().err


def run(*command, **environment):
    path = os.pathsep.join(filter(None, [str(tiny_runs.ROOT), os.environ.get('PYTHONPATH')]))
    environment = {**os.environ, 'PYTHONPATH': path, 'OMP_NUM_THREADS': '1', **environment}
    return subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_as_a_script_an_error_leaves_no_traceback():
    result = run(sys.executable, tiny_runs.ROOT / 'tools/train.py', 'nowhere.py')
    assert result.returncode == 2
    assert 'error: there is no config file nowhere.py' in result.stderr
    assert 'Traceback' not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize('norm', ['UN', pytest.param('SyncUN', marks=pytest.mark.grid)])
def test_two_processes_train_the_digits_detector(tmp_path, norm, monkeypatch):
    base = tiny_runs.ROOT / 'configs/digits/swin_un_fasterrcnn.py'
    config = tmp_path / 'detector.py'
    config.write_text(KEPT.format(base=base, norm=norm))
    options = tiny_runs.tiny_data(Config.fromfile(base), tmp_path / 'data')
    # What each process has when the checkpoint is written.
    (tmp_path / 'keeping.py').write_text(KEEPING)
    monkeypatch.syspath_prepend(tmp_path)
    assert processes.run_tool('train', config, '--work-dir', 'w', '--cfg-options', *options, 'train_cfg.max_iters=2',
                              'train_dataloader.batch_size=1', processes=2) == [0, 0]
    saved = torch.load('w/iter_2.pth', weights_only=False)['state_dict']
    states = [torch.load(f'rank{rank}.pt') for rank in range(2)]
    before, after = ([state[moment] for state in states] for moment in ('before', 'after'))
    norms = [key for key in saved if key.endswith('activation_record')]
    assert norms
    for key in norms:
        assert torch.equal(before[0][key], before[1][key]) == (norm == 'SyncUN'), key
        torch.testing.assert_close(saved[key], (before[0][key] + before[1][key]) / 2)
        assert saved[key].isfinite().all()
    for state in after:
        torch.testing.assert_close(state, dict(saved), rtol=0, atol=0)
    assert saved['backbone.norm0.num_batches_tracked'] == 2


KEPT = """
_base_ = ['{base}']
custom_imports = dict(imports=['mmunorm', 'keeping'])
custom_hooks = [dict(type='KeepHook')]
model = dict(backbone=dict(norm_cfg=dict(type='{norm}')))
"""
KEEPING = """
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class KeepHook(Hook):

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.before = {key: value.clone() for key, value in runner.model.module.state_dict().items()}

    def after_train(self, runner):
        torch.save(dict(before=self.before, after=runner.model.module.state_dict()), f'rank{get_rank()}.pt')
"""


@pytest.mark.slow
def test_two_processes_without_a_gpu(classifier, tmp_path):
    """dist_train.sh runs in test_interruption."""
    assert processes.run_tool('train', classifier, '--work-dir', 'w', '--auto-scale-lr', processes=2) == [0, 0]
    # Two processes with two pictures each see all four in one step, a batch of 4 of 8.
    entry = next(entry for entry in scalars(tmp_path / 'w') if 'lr' in entry)
    assert (entry['iter'], entry['lr']) == (1, pytest.approx(0.05))

    result = run('bash', tiny_runs.ROOT / 'tools/dist_test.sh', classifier, 'w/epoch_1.pth', 2, '--out',
                 'predictions.pkl', **processes.without_a_gpu())
    assert result.returncode == 0, result.stderr
    with open('predictions.pkl', 'rb') as file:
        predictions = pickle.load(file)
    single = run_test(classifier, 'w/epoch_1.pth')
    correct = [int(item['pred_label']) == int(item['gt_label']) for item in predictions]
    assert len(correct) == 4 and single['accuracy/top1'] == pytest.approx(100 * np.mean(correct))


@pytest.mark.parametrize('script, usage', [
    ('dist_train.sh', 'CONFIG GPUS'), ('dist_test.sh', 'CONFIG CHECKPOINT GPUS'),
    ('slurm_train.sh', 'PARTITION JOB_NAME CONFIG WORK_DIR')])
def test_scripts_say_how_they_are_used(script, usage):
    result = run('bash', tiny_runs.ROOT / 'tools' / script)
    assert result.returncode == 2 and usage in result.stderr


def test_slurm_asks_for_one_process_a_gpu(tmp_path):
    srun = tmp_path / 'bin/srun'
    srun.parent.mkdir()
    srun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    result = run('bash', tiny_runs.ROOT / 'tools/slurm_train.sh', 'part', 'job', 'my config.py', 'w', '--amp',
                 GPUS='16', PYTHON='python3', SRUN_ARGS='--qos low',
                 PATH=f'{srun.parent}{os.pathsep}{os.environ["PATH"]}')
    assert result.returncode == 0, result.stderr
    words = result.stdout.splitlines()
    for word in ('--gres=gpu:8', '--ntasks=16', '--ntasks-per-node=8', '--qos', 'low', '--job-name=job'):
        assert word in words
    command = words[words.index('python3'):]
    assert command[2].endswith('tools/train.py')
    assert command[3:] == ['my config.py', '--work-dir', 'w', '--launcher', 'slurm', '--amp']
