"""tools/train.py and tools/test.py, alone and in two processes, and the scripts around them."""
import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from mmunorm.cli.arguments import load_config
from mmunorm.config.models import build_model

from .. import processes, tiny_runs

pytestmark = pytest.mark.usefixtures('in_a_folder')


def load_predictions():
    with open('predictions.pkl', 'rb') as file:
        return pickle.load(file)


def test_trains_into_work_dirs_is_tested_and_resumes_with_the_state_of_its_norms(classifier, tmp_path):
    """And a work directory without a checkpoint starts at the beginning."""
    config, *_ = classifier
    train = ('train', config, '--auto-scale-lr', '--resume', '--cfg-options',
             'model.backbone.norm_cfg.warmup_iters=3', 'train_cfg.max_epochs=3')
    tiny_runs.call(*train)
    work_dir = tmp_path / 'work_dirs/classifier'
    assert (work_dir / 'last_checkpoint').read_text().endswith('epoch_3.pth')
    logged = tiny_runs.scalars(work_dir)
    metrics = tiny_runs.call('test', config, 'work_dirs/classifier/epoch_3.pth')
    assert metrics['accuracy/top1'] == logged[-1]['accuracy/top1']
    # The config's 0.1 is for a batch of 8; this is one of 2.
    rates = [entry['lr'] for entry in logged if 'lr' in entry]
    assert rates and rates == pytest.approx([0.025] * len(rates))

    tiny_runs.call(*train, 'train_cfg.max_epochs=1', 'work_dir=parts')
    tiny_runs.call(*train, 'work_dir=parts')
    whole, parts = (tiny_runs.checkpoint(f'{folder}/epoch_3.pth') for folder in (work_dir, 'parts'))
    torch.testing.assert_close(parts['state_dict'], whole['state_dict'], rtol=0, atol=0)
    assert parts['state_dict']['backbone.norm1.num_batches_tracked'] == parts['meta']['iter'] == 6


@pytest.mark.parametrize(('backbone', 'norm', 'number'), [
    ("'SwinTransformer', arch=dict(embed_dims=12, depths=[1, 1], num_heads=[1, 2]), img_size=32, window_size=4, "
     'out_indices=(1, )', 'UN', 7),
    ("'ConvNeXt', arch=dict(depths=[1, 1, 1, 1], channels=[12, 12, 24, 24]), gap_before_final_norm=False",
     'UN2d', 9)])
def test_every_norm_of_a_stock_backbone_is_another(backbone, norm, number, classifier, tmp_path):
    """From training to a folded file; mmpretrain's Swin passes norm_cfg to one norm alone, ConvNeXt's are over maps."""
    config = tmp_path / 'stock.py'
    config.write_text(f"_base_ = ['{classifier[0]}']\nmodel = dict(backbone=dict(_delete_=True, type={backbone}))\n")
    mine = config, '--norm', 'mine=UN,warmup_iters=1', '--work-dir', 'w'
    tiny_runs.call('train', *mine)
    state = tiny_runs.checkpoint('w/epoch_1.pth')['state_dict']
    assert sum(name.endswith('running_var') for name in state) == number
    assert f'norms: {number} {norm};' in next(tmp_path.glob('w/*/*.log')).read_text()
    metrics = tiny_runs.call('test', config, 'w/epoch_1.pth', *mine[1:], '--fuse', '--save', 'w/folded.pth')
    assert tiny_runs.call('test', config, 'w/folded.pth', '--work-dir', 'w') == metrics


@pytest.mark.slow
def test_a_detector_starts_from_a_classifier_and_is_tested(tmp_path):
    config, options = tiny_runs.write_detector(tmp_path)
    weight = torch.randn(12, 3, 4, 4)
    torch.save(dict(state_dict={'backbone.patch_embed.projection.weight': weight}), 'weights.pth')
    tiny_runs.call('train', config, '--work-dir', 'w', '--cfg-options', *options[:-1], 'pretrained=weights.pth',
                   'optim_wrapper.optimizer.lr=0.0')
    state = tiny_runs.checkpoint('w/epoch_1.pth')['state_dict']
    assert torch.equal(state['backbone.patch_embed.projection.weight'], weight)

    tiny_runs.call('test', config, 'w/epoch_1.pth', '--work-dir', 'w', '--out', 'predictions.pkl', '--show-dir',
                   'images', '--cfg-options', *options)
    predictions = load_predictions()
    assert [len(item['pred_instances']['scores']) for item in predictions] == [5, 5]
    assert {'counts', 'size'} == set(predictions[0]['pred_instances']['masks'][0])
    assert len(list(tmp_path.glob('w/*/images/*.jpg'))) == 2


def test_layer_norms_are_folded_as_the_hook_says(classifier, tmp_path, capsys):
    config, *_ = classifier
    model = build_model(load_config(config, norm='LN'))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.save(model.state_dict(), 'ln.pth')
    hook = "_base_ = ['{}']\ncustom_hooks = [dict(type='FuseNormsHook', {})]\n"
    Path('how.py').write_text(hook.format(config, "rotate='hadamard'"))
    expected = tiny_runs.call('test', config, 'ln.pth', '--norm', 'LN', '--work-dir', 'w')
    assert tiny_runs.call('test', 'how.py', 'ln.pth', '--norm', 'LN', '--fuse', '--save', 'folded.pth', '--work-dir',
                          'v') == expected
    logged = next((tmp_path / 'v').glob('*/*.log')).read_text()
    assert 'fuse_norms: 7 norms: 6 are now norms without weights, 1 without weights, and a linear layer\n' in logged
    assert ' rotated: report.streams' in logged
    assert logged.count('fuse_norms: ') == 1
    assert tiny_runs.call('test', config, 'folded.pth', '--norm', 'LN', '--work-dir', 'w') == expected
    Path('how.py').write_text(hook.format(config, "layer_norms='keep'"))
    with pytest.raises(SystemExit):  # with the reason for each norm
        tiny_runs.call('test', 'how.py', 'ln.pth', '--norm', 'LN', '--fuse', '--save', 'kept.pth')
    assert '--save kept.pth: no norm could be folded.' in capsys.readouterr().err and not Path('kept.pth').exists()


@pytest.mark.slow
def test_two_processes_without_a_gpu(classifier):
    config, *_ = classifier
    assert processes.run_tool('train', config, '--work-dir', 'w', '--auto-scale-lr', processes=2) == [0, 0]
    # Two processes with two images each see all four in one step, a batch of 4 of 8.
    entry = next(entry for entry in tiny_runs.scalars('w') if 'lr' in entry)
    assert (entry['iter'], entry['lr']) == (1, pytest.approx(0.05))

    test = 'test', config, 'w/epoch_1.pth', '--out', 'predictions.pkl'
    assert processes.run_tool(*test, processes=2) == [0, 0]
    correct = [int(item['pred_label']) == int(item['gt_label']) for item in load_predictions()]
    assert len(correct) == 4 and tiny_runs.call(*test)['accuracy/top1'] == pytest.approx(100 * np.mean(correct))


def run_script(name, *arguments, **environment):
    return subprocess.run(['bash', tiny_runs.ROOT / 'tools' / name, *arguments], env={**os.environ, **environment},
                          capture_output=True, text=True)


def test_scripts_ask_for_one_process_a_gpu(tmp_path):
    for name in ('srun', 'python'):  # print their arguments
        path = tmp_path / 'bin' / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
        path.chmod(0o755)
    environment = dict(GPUS='16', PYTHON=str(path), SRUN_ARGS='--qos low',
                       PATH=f'{path.parent}{os.pathsep}{os.environ["PATH"]}')
    words = run_script('slurm_train.sh', 'part', 'job', 'my config.py', 'w', '--amp', **environment).stdout.splitlines()
    assert {'--gres=gpu:8', '--ntasks=16', '--ntasks-per-node=8', '--qos', 'low', '--job-name=job'} <= set(words)
    _, script, *others = words[words.index(str(path)) + 1:]
    assert script.endswith('tools/train.py')
    assert others == ['my config.py', '--work-dir', 'w', '--launcher', 'slurm', '--amp']

    words = run_script('dist_train.sh', 'my config.py', '2', '--amp', **environment).stdout.splitlines()
    script, *others = words[words.index('--nproc_per_node=2') + 1:]
    assert script.endswith('tools/train.py') and others == ['my config.py', '--launcher', 'pytorch', '--amp']

    words = run_script('dist_test.sh', 'my config.py', 'a.pth', '3', '--fuse', **environment).stdout.splitlines()
    assert words[:2] == ['-m', 'torch.distributed.run'] and '--nproc_per_node=3' in words
    script, *others = words[words.index('--nproc_per_node=3') + 1:]
    assert script.endswith('tools/test.py') and others == ['my config.py', 'a.pth', '--launcher', 'pytorch', '--fuse']
