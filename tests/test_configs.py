"""Every config is built; those with UN are trained one step and tested one step by the real tools."""
import copy
import re
from functools import cache
from pathlib import Path

import mmdet
import mmpretrain
import pytest
import torch
from mmengine.config import Config
from mmengine.fileio import load as load_file
from mmengine.hub import get_config
from mmengine.registry import HOOKS

from mmunorm.config.models import build_model
from mmunorm.config.presets import NORMS, slug

from . import tiny_runs

FOLDER = tiny_runs.ROOT / 'configs'
CONFIGS = tiny_runs.configs_in(FOLDER)


def norm_of(name):
    """The norm in a config's name."""
    return next(norm for norm in ('ln', 'un') if f'_{norm}_' in f'{name}_')


read = cache(lambda name: get_config(name) if '::' in name else Config.fromfile(FOLDER / f'{name}.py'))


def load(name):
    return copy.deepcopy(read(name))


# The models of other configs are compared with these.
@pytest.mark.parametrize('name', [
    name for name in CONFIGS if norm_of(name) == 'un' and '_1x' not in name and not name.startswith('convert/')])
def test_every_norm_is_the_named_one_and_has_no_weight_decay(name):
    tiny_runs.check_norms_and_decay(tiny_runs.shrink(load(name)), norm_of(name))


def recipe(cfg):
    """A config without its norms and their checkpoints."""
    cfg = cfg.to_dict()
    for key in ('pretrained', 'load_from'):
        cfg.pop(key, None)
    cfg['model']['backbone'].pop('norm_cfg', None)
    if 'checkpoint' in (cfg['model']['backbone'].get('init_cfg') or {}):  # which may be a list
        cfg['model']['backbone']['init_cfg'].pop('checkpoint')
    return cfg


@pytest.mark.parametrize('name', [name for name in CONFIGS if norm_of(name) == 'ln'])
def test_twins_differ_in_the_norm_alone(name):
    cfg, ln = load(name.replace('_ln_', '_un_')), load(name)
    assert recipe(cfg) == recipe(ln)
    for config, norm in ((cfg, 'un'), (ln, 'ln')):
        if config.get('pretrained'):
            assert f'_{norm}_' in config.pretrained
            assert config.model.backbone.init_cfg.checkpoint == config.pretrained


@pytest.mark.parametrize('folder', ['', 'convert'])
def test_the_metafile_is_found_and_lists_every_config_and_results_of_the_readme(folder):
    content = load_file(FOLDER / folder / 'metafile.yml')
    collection, = content['Collections']
    readme = (tiny_runs.ROOT / collection['README']).read_text()
    assert collection['README'] == (Path('configs') / folder / 'README.md').as_posix()
    assert [model['Config'] for model in content['Models']] == [
        f"configs/{folder}/{model['Name']}.py".replace('//', '/') for model in content['Models']]
    assert {path.stem for path in (FOLDER / folder).glob('*.py')} == {model['Name'] for model in content['Models']}
    shown = set(map(float, re.findall(r'\| ([\d.]+) ', readme)))
    index = tiny_runs.ROOT / 'mmunorm/.mim/model-index.yml'
    assert FOLDER / folder / 'metafile.yml' in {(index.parent / path).resolve() for path in load_file(index)['Import']}
    for model in content['Models']:
        assert model['In Collection'] == collection['Name']
        assert {value for result in model.get('Results', ()) for value in result['Metrics'].values()} <= shown


def without_scopes(value):
    if isinstance(value, dict):
        return {key: without_scopes(inner) for key, inner in value.items() if key != '_scope_'}
    return [without_scopes(inner) for inner in value] if isinstance(value, (list, tuple)) else value


# Of a conversion, by its name.
BASES = {
    'deit_s_un_imagenet_converted': 'mmpretrain::deit/deit-small_4xb256_in1k.py',
    'swin_t_un_imagenet_converted': 'swin_t_un_imagenet',
    'swin_t_un_maskrcnn_converted': 'swin_t_un_maskrcnn_1x',
}
METAFILES = [Path(package.__file__).parent / '.mim/configs' / folder / 'metafile.yml'
             for package, folder in ((mmpretrain, 'swin_transformer'), (mmpretrain, 'deit'), (mmdet, 'swin'))]


@pytest.mark.parametrize('name', [name.removeprefix('convert/') for name in CONFIGS if name.startswith('convert/')])
def test_a_conversion_is_its_recipe_from_a_layer_norm_checkpoint(name):
    cfg, base = (without_scopes(load(path).to_dict()) for path in (f'convert/{name}', BASES[name]))
    for config in (cfg, base):
        config['model']['backbone'].pop('init_cfg', None)
    norm_cfg = cfg['model']['backbone'].pop('norm_cfg')
    assert norm_cfg == base['model']['backbone'].pop('norm_cfg', norm_cfg) and norm_cfg['type'] == 'UN'
    assert cfg['model'] == base['model'] and cfg['train_dataloader'] == base['train_dataloader']
    teacher, = map(HOOKS.build, cfg['custom_hooks'])
    assert cfg['load_from'].startswith('work_dirs/converted/')  # what tools/convert_norms.py writes
    if '://' in teacher.checkpoint:
        published = [line for index in METAFILES for line in index.read_text().splitlines()]
        assert any(line.endswith(teacher.checkpoint.rpartition('/')[2]) for line in published)


@pytest.mark.parametrize('detector', ['maskrcnn', 'fasterrcnn'])
def test_1x_is_a_third_of_3x(detector):
    short, long = load(f'swin_t_un_{detector}_1x'), load(f'swin_t_un_{detector}_3x')
    assert short.train_cfg.max_epochs == short.param_scheduler[1].end == 12
    assert short.param_scheduler[1].milestones == [8, 11]
    short.train_cfg.max_epochs = 36
    short.param_scheduler[1].update(end=36, milestones=[27, 33])
    for scheduler in long.param_scheduler:
        scheduler.pop('_scope_')
    for key in ('train_cfg', 'param_scheduler', 'model', 'optim_wrapper', 'train_dataloader'):
        assert short[key] == long[key]


@pytest.mark.parametrize('norm', [norm if norm in ('UN+', 'NoNorm') else
                                  pytest.param(norm, marks=pytest.mark.grid) for norm in NORMS])
def test_every_norm_trains_and_tests_in_a_small_model(norm, classifier, in_a_folder):
    config, *_ = classifier
    tiny_runs.call('train', config, '--norm', norm)
    folder = f'classifier_{slug(norm)}' if norm != 'UN' else 'classifier'
    checkpoint = f'work_dirs/{folder}/epoch_1.pth'
    state = tiny_runs.checkpoint(checkpoint)['state_dict']
    assert all(tensor.isfinite().all() for tensor in state.values())
    # Every norm parameter has changed.
    norms = [name for name in state if name.endswith('norm1.weight')]
    assert bool(norms) == (norm != 'NoNorm')
    assert not any(torch.equal(state[name], torch.ones_like(state[name])) for name in norms)
    assert tiny_runs.call('test', config, checkpoint, '--norm', norm)['accuracy/top1'] >= 0


# Section 6 of the specification: optimizer, learning rate, weight decay, epochs, total batch.
RECIPES = {
    'swin_t_un_maskrcnn_3x': ('AdamW', 1e-4, 0.05, 36, 16),
    'swin_t_un_fasterrcnn_3x': ('AdamW', 1e-4, 0.05, 36, 16),
    'swin_t_un_imagenet': ('AdamW', 1e-3, 0.05, 300, 1024),
    't2t_vit_14_un_imagenet': ('AdamW', 5e-4, 0.05, 300, 512),
    't2t_vit_14_un_cifar10': ('SGD', 0.05, 5e-4, 60, 128),
    't2t_vit_14_un_cifar100': ('SGD', 0.05, 5e-4, 60, 128),
}


@pytest.mark.parametrize('name', RECIPES)
def test_recipe(name):
    cfg = load(name)
    optimizer = cfg.optim_wrapper.optimizer
    assert RECIPES[name] == (optimizer.type, optimizer.lr, optimizer.weight_decay,
                             cfg.train_cfg.max_epochs, cfg.auto_scale_lr.base_batch_size)
    backbone = cfg.model.backbone
    if 'rcnn' in name:
        assert (backbone.window_size, backbone.drop_path_rate, backbone.pad_small_map) == (7, 0.2, True)
        assert tuple(backbone.out_indices) == (0, 1, 2, 3)
        assert cfg.train_dataloader.batch_size * 8 == 16
        assert cfg.test_dataloader.dataset.pipeline[1].scale == (1333, 800)
        assert cfg.test_evaluator.metric == (['bbox', 'segm'] if 'mask' in name else 'bbox')
    if 't2t' in name:
        assert backbone.t2t_cfg == dict(token_dims=64, use_performer=True)
    if 'cifar' in name:
        assert optimizer.momentum == 0.9 and cfg.train_dataloader.batch_size == 128
        for split in ('train', 'test'):
            dataset = cfg[f'{split}_dataloader'].dataset
            assert dataset.pipeline[0] == dict(type='Resize', scale=224)
            # No download.
            assert dataset.download is False


def test_a_backbone_starts_from_the_imagenet_classifier(tmp_path):
    cfg, classifier = map(tiny_runs.shrink, map(load, ('swin_t_un_maskrcnn_3x', 'swin_t_un_imagenet')))
    classifier = build_model(classifier)
    for tensor in classifier.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
    torch.save(dict(state_dict=classifier.state_dict()), tmp_path / 'epoch_300.pth')
    cfg.model.backbone.init_cfg.checkpoint = str(tmp_path / 'epoch_300.pth')
    backbone = build_model(cfg).backbone
    backbone.init_weights()
    source, target = classifier.backbone.state_dict(), backbone.state_dict()
    assert all(torch.equal(tensor, target[key]) for key, tensor in source.items())
    # A detector has an output norm for each level, a classifier for the last alone.
    assert {key.split('.')[0] for key in set(target) - set(source)} == {'norm0', 'norm1', 'norm2'}


# What stands for all others, which are in the grid, with options that make it smaller. tests/tools trains a narrow
# detector on COCO.
SAMPLE = {'t2t_vit_14_un_cifar10': ['model.backbone.num_layers=2']}


@pytest.mark.slow
@pytest.mark.parametrize('name', [
    name if name in SAMPLE else pytest.param(name, marks=pytest.mark.grid) for name in CONFIGS
    if not name.startswith('convert/')])
def test_trains_and_tests_one_step(name, in_a_folder, tmp_path, monkeypatch):
    config = FOLDER / f'{name}.py'
    options = [*tiny_runs.tiny_data(Config.fromfile(config), tmp_path / 'data', monkeypatch), *SAMPLE.get(name, [])]
    wanted = {'coco/bbox_mAP'} if 'rcnn' in name else {'accuracy/top1'}
    if 'maskrcnn' in name:
        wanted.add('coco/segm_mAP')
    state = tiny_runs.train_and_test_one_step(config, options, wanted)
    steps = {int(tensor) for key, tensor in state.items() if key.endswith('num_batches_tracked')}
    assert steps == (set() if '_ln_' in name else {1})
