"""tools/train.py and tools/test.py, alone and in two processes; what they refuse, and the scripts around them."""
import os
import pickle
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from mmengine.config import Config

from mmunorm.cli import training
from mmunorm.cli.arguments import load_config
from mmunorm.config.models import build_model

from .. import processes, tiny_runs

pytestmark = pytest.mark.usefixtures('in_a_folder')
CONFIGS = tiny_runs.ROOT / 'configs'


def load_predictions():
    with open('predictions.pkl', 'rb') as file:
        return pickle.load(file)


def test_trains_into_work_dirs_and_is_tested(classifier, tmp_path):
    config, *_ = classifier
    tiny_runs.call('train', config, '--cfg-options', 'train_cfg.max_epochs=3')
    work_dir = tmp_path / 'work_dirs/classifier'
    assert (work_dir / 'last_checkpoint').read_text().endswith('epoch_3.pth')
    metrics = tiny_runs.call('test', config, 'work_dirs/classifier/epoch_3.pth')
    assert metrics['accuracy/top1'] == tiny_runs.scalars(work_dir)[-1]['accuracy/top1'] == 100


@pytest.mark.parametrize(('backbone', 'norm', 'number'), [
    ("'SwinTransformer', arch=dict(embed_dims=12, depths=[1, 1], num_heads=[1, 2]), img_size=32, window_size=4, "
     'out_indices=(1, )', 'UN', 7),
    ("'ConvNeXt', arch=dict(depths=[1, 1, 1, 1], channels=[12, 12, 24, 24]), gap_before_final_norm=False",
     'UN2d', 9)])
def test_every_norm_of_a_stock_backbone_is_another(backbone, norm, number, classifier, tmp_path):
    """From training to a folded file; mmpretrain's Swin gives norm_cfg to one norm alone, ConvNeXt's are over maps."""
    config = tmp_path / 'stock.py'
    config.write_text(f"_base_ = ['{classifier[0]}']\nmodel = dict(backbone=dict(_delete_=True, type={backbone}))\n")
    mine = config, '--norm', 'mine=UN,warmup_iters=1', '--work-dir', 'w'
    tiny_runs.call('train', *mine)
    state = tiny_runs.checkpoint('w/epoch_1.pth')['state_dict']
    assert sum(name.endswith('running_var') for name in state) == number
    assert f'norms: {number} {norm};' in next(tmp_path.glob('w/*/*.log')).read_text()
    metrics = tiny_runs.call('test', config, 'w/epoch_1.pth', *mine[1:], '--fuse', '--save', 'w/folded.pth')
    assert tiny_runs.call('test', config, 'w/folded.pth', *mine[1:]) == metrics
    assert tiny_runs.call('test', config, 'w/folded.pth', '--work-dir', 'w') == metrics


def test_amp_and_auto_scale_lr(classifier):
    tiny_runs.call('train', classifier[0], '--work-dir', 'w', '--amp', '--auto-scale-lr')
    wrapper = 'AmpOptimWrapper' if torch.cuda.is_available() else 'BFloat16OptimWrapper'
    assert Config.fromfile('w/classifier.py').optim_wrapper.type == wrapper
    # The config's 0.1 is for a batch of 8; this is one of 2.
    assert [entry['lr'] for entry in tiny_runs.scalars('w') if 'lr' in entry] == [pytest.approx(0.025)]


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


def test_tta_averages_an_image_and_its_mirror_image(classifier, tmp_path):
    config, checkpoint, _ = classifier
    mirror = tmp_path / 'mirror.py'
    mirror.write_text(f"_base_ = ['{config}']\nfrom copy import deepcopy\ntest_dataloader = deepcopy("
                      "_base_.test_dataloader)\ntest_dataloader.dataset.pipeline.insert(2, dict(type='RandomFlip', "
                      'prob=1.))\n')
    own = tmp_path / 'own.py'
    own.write_text(f"_base_ = ['{mirror}']\ntta_model = dict(type='AverageClsScoreTTA')\ntta_pipeline = [*_base_."
                   "pipeline[:2], dict(type='TestTimeAug', transforms=[[_base_.pipeline[2]]])]\n")
    scores = []
    for path, *flags in ((config, ), (mirror, ), (config, '--tta'), (config, '--tta', '--fuse'), (own, '--tta')):
        tiny_runs.call('test', path, checkpoint, '--work-dir', 'w', '--out', 'predictions.pkl', *flags, '--cfg-options',
                       'test_dataloader.sampler.shuffle=False')
        scores.append(torch.stack([each['pred_score'] for each in load_predictions()]))
    plain, mirrored, tta, fused, own = scores
    assert not torch.allclose(plain, mirrored)
    torch.testing.assert_close(tta, (plain + mirrored) / 2)
    torch.testing.assert_close(fused, tta)
    torch.testing.assert_close(own, plain)  # one view of each image


def test_tta_of_a_detector(tmp_path, capsys):
    base = CONFIGS / 'digits/swin_un_fasterrcnn.py'
    cfg = Config.fromfile(base)
    options = '--work-dir', 'w', '--out', 'predictions.pkl', '--cfg-options', *tiny_runs.tiny_data(cfg, tmp_path / 'd')
    tiny_runs.save_weights(load_config(str(base), {'pretrained': None}), 'a.pth', tuple('0123456789'))
    found = []
    for flags in ([], ['--tta'], ['--tta', '--fuse']):
        tiny_runs.call('test', base, 'a.pth', *flags, *options)
        found.append([item['pred_instances']['scores'] for item in load_predictions()])
    plain, tta, fused = found
    assert all(len(one) > 5 for one in tta) and all(len(one) == 5 for one in plain)  # five of each view
    torch.testing.assert_close(fused, tta)
    masks = CONFIGS / 'digits/swin_un_maskrcnn.py'
    assert 'DetTTAModel merges boxes, and this model has a mask head' in tiny_runs.error_of(
        capsys, 'test', masks, 'a.pth', '--tta', *options)


def test_missing_data_and_weights_are_told_of_before_a_model_is_built(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, 'build_runner', lambda cfg: pytest.fail('a model was built'))
    config = CONFIGS / 'swin_t_un_maskrcnn_3x.py'
    (tmp_path / 'epoch_1.pth').write_text('')
    for tool, *arguments in (('train', config), ('test', config, 'epoch_1.pth')):
        message = tiny_runs.error_of(capsys, tool, *arguments)
        assert 'cocodataset.org' in message and re.search(r'no (file|folder) data/', message)
    options = tiny_runs.tiny_data(Config.fromfile(config), tmp_path / 'coco')
    message = tiny_runs.error_of(capsys, 'train', config, '--cfg-options',
                                 *(option for option in options if option != 'pretrained=None'))
    assert 'work_dirs/swin_t_un_imagenet/epoch_300.pth' in message
    assert re.search(r'`python tools/train.py \S*configs/swin_t_un_imagenet.py`', message)
    assert '`--cfg-options pretrained=None`' in message


def test_other_mistakes_are_one_line(classifier, tmp_path, capsys):
    config, checkpoint, _ = classifier
    (tmp_path / 'broken.py').write_text('model = dict(\n')
    (tmp_path / 'w').mkdir()
    hooks = tmp_path / 'hooks.py'
    hooks.write_text(f"_base_ = ['{config}']\ncustom_hooks = [dict(type='NormStatisticsHook', layers=['typo'])]\n")
    for said, *command in (
            ('no config file nowhere.py', 'train', 'nowhere.py'), ('yntax', 'train', 'broken.py'),
            ('no checkpoint nowhere.pth', 'test', config, 'nowhere.pth'),
            ('no checkpoint nowhere.pth', 'train', config, '--resume', 'nowhere.pth'),
            ('w is a folder: a checkpoint is a file', 'test', config, 'w'),
            ('w is a folder: a checkpoint is a file', 'train', config, '--resume', 'w'),
            ("no norm 'UNX'", 'train', config, '--cfg-options', 'model.backbone.norm_cfg.type=UNX'),
            ('--out takes a .pkl file, got c.json', 'test', 'a.py', 'b.pth', '--out', 'c.json'),
            ('--save writes a folded checkpoint: add --fuse', 'test', 'a.py', 'b.pth', '--save', 'c.pth'),
            ("NormStatisticsHook: layers: no norm has a name with 'typo' in it; the ", 'train', hooks)):
        assert said in tiny_runs.error_of(capsys, *command)
    torch.save(build_model(load_config(config, norm='LN')).state_dict(), 'ln.pth')
    hooks.write_text(f"_base_ = ['{config}']\ncustom_hooks = [dict(type='FuseNormsHook', layer_norms='keep')]\n")
    with pytest.raises(SystemExit):  # with the reason for each norm
        tiny_runs.call('test', hooks, 'ln.pth', '--fuse', '--save', 'kept.pth', '--norm', 'LN')
    assert '--save kept.pth: no norm could be folded.' in capsys.readouterr().err
    assert not (tmp_path / 'kept.pth').exists()


@pytest.mark.parametrize(('how', 'left'), [
    ('', 'a scale of each token'), ("layer_norms='affine'", 'its mean and a scale of each token'),
    ("rotate='hadamard'", 'a scale of each token')])
def test_layer_norms_are_folded_as_the_hook_says(classifier, tmp_path, how, left):
    config, *_ = classifier
    model = build_model(load_config(config, norm='LN'))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.save(model.state_dict(), 'ln.pth')
    (tmp_path / 'how.py').write_text(f"_base_ = ['{config}']\ncustom_hooks = [dict(type='FuseNormsHook', {how})]\n")
    expected = tiny_runs.call('test', config, 'ln.pth', '--norm', 'LN', '--work-dir', 'w')
    assert tiny_runs.call('test', 'how.py', 'ln.pth', '--norm', 'LN', '--fuse', '--save', 'folded.pth', '--work-dir',
                          'v') == expected
    logged = next((tmp_path / 'v').glob('*/*.log')).read_text()
    assert f'6 of 7 norms folded except {left}\n' in logged and logged.count('fuse_norms: ') == 1
    assert tiny_runs.call('test', config, 'folded.pth', '--norm', 'LN', '--work-dir', 'w') == expected


def test_a_checkpoint_of_another_model_is_neither_tested_nor_resumed(classifier, tmp_path, capsys):
    config, checkpoint, _ = classifier
    shutil.copy(checkpoint, 'own.pth')
    before = (tmp_path / 'own.pth').read_bytes()
    other = ('--cfg-options', 'model.head.in_channels=3')
    for said, *command in (
            (r"own.pth has backbone.norm1.activation_record: its norms are not the config's.* UN\.$", '--norm', 'LN'),
            (r"own.pth lacks backbone.norm1.eta: its norms are not the config's.* UN\.$", '--norm', 'UN+'),
            ('own.pth does not fit the config: .*head.fc.weight', *other)):
        for tool, *arguments in (('test', 'own.pth'), ('train', '--work-dir', 'w', '--resume', 'own.pth')):
            assert re.search(said, tiny_runs.error_of(capsys, tool, config, *arguments, *command))
    for said, path in (('would overwrite', './own.pth'), ('must be a regular file', '.')):
        assert said in tiny_runs.error_of(capsys, 'test', config, 'own.pth', '--fuse', '--save', path)
    assert (tmp_path / 'own.pth').read_bytes() == before and not list(tmp_path.glob('w/*.pth'))


def test_what_cannot_be_built_is_one_line(classifier, capsys):
    assert "unexpected keyword argument 'colour'" in tiny_runs.error_of(
        capsys, 'test', *classifier[:2], '--work-dir', 'w', '--cfg-options', 'test_evaluator.colour=1')
    assert tiny_runs.error_of(capsys, 'train', classifier[0], '--cfg-options', 'model.backbone.drop_path_rat=0.1') == (
        'error: --cfg-options model.backbone.drop_path_rat: UNSwinTransformer has no such argument; did you mean '
        'model.backbone.drop_path_rate?')
    for option in ('model.colour=1', 'train_dataloader.batch_size=0', 'optim_wrapper.optimizer.lr=-1',
                   'val_dataloader.dataset.indices=0', 'val_evaluator.colour=1'):
        assert 'cannot build the config' in tiny_runs.error_of(
            capsys, 'train', classifier[0], '--work-dir', 'w', '--cfg-options', option)
    assert 'no training step' in tiny_runs.error_of(
        capsys, 'train', classifier[0], '--work-dir', 'w', '--cfg-options', 'train_cfg.max_epochs=0')
    assert re.search('param_scheduler.0.begin=1: this CosineAnnealingLR .* 1 epochs', tiny_runs.error_of(
        capsys, 'train', write_schedule(classifier[0]), '--work-dir', 'w'))
    assert 'pip install wandb' in tiny_runs.error_of(
        capsys, 'train', classifier[0], '--work-dir', 'w', '--cfg-options',
        'visualizer.vis_backends.0.type=WandbVisBackend')


def write_schedule(config):
    path = config.with_name('schedule.py')
    path.write_text(f"_base_ = ['{config}']\nparam_scheduler = dict(type='CosineAnnealingLR', begin=1)\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize('norm', ['UN', pytest.param('SyncUN', marks=pytest.mark.grid)])
def test_two_processes_train_the_digits_detector(tmp_path, norm, monkeypatch):
    base = CONFIGS / 'digits/swin_un_fasterrcnn.py'
    config = tmp_path / 'detector.py'
    config.write_text(KEPT.format(base=base, norm=norm))
    options = tiny_runs.tiny_data(Config.fromfile(base), tmp_path / 'data')
    # What each process has when the checkpoint is written.
    (tmp_path / 'keeping.py').write_text(KEEPING)
    monkeypatch.syspath_prepend(tmp_path)
    assert processes.run_tool('train', config, '--work-dir', 'w', '--cfg-options', *options, 'train_cfg.max_iters=2',
                              'train_dataloader.batch_size=1', processes=2) == [0, 0]
    saved = tiny_runs.checkpoint('w/iter_2.pth')['state_dict']
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
def test_two_processes_without_a_gpu(classifier):
    """dist_train.sh runs in test_interruption."""
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


def test_scripts_say_how_they_are_used():
    for script, usage in (('dist_train.sh', 'CONFIG GPUS'), ('dist_test.sh', 'CONFIG CHECKPOINT GPUS'),
                          ('slurm_train.sh', 'PARTITION JOB_NAME CONFIG WORK_DIR')):
        result = run_script(script)
        assert result.returncode == 2 and usage in result.stderr


def test_scripts_ask_for_one_process_a_gpu(tmp_path):
    for name in ('srun', 'python'):  # print what they are called with
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

    words = run_script('dist_test.sh', 'my config.py', 'a.pth', '3', '--fuse', **environment).stdout.splitlines()
    assert words[:2] == ['-m', 'torch.distributed.run'] and '--nproc_per_node=3' in words
    script, *others = words[words.index('--nproc_per_node=3') + 1:]
    assert script.endswith('tools/test.py') and others == ['my config.py', 'a.pth', '--launcher', 'pytorch', '--fuse']
