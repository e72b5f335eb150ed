"""Every config is built; those with UN are trained one step and tested one step by the real tools."""
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import HOOKS

from mmunorm.cli.arguments import load_config
from mmunorm.config.models import build_model
from mmunorm.deploy.preprocessing import steps_of
from tests import tiny_runs
from tests.test_configs import recipe

from .data import tiny_digits

FOLDER = tiny_runs.ROOT / 'projects/digits/configs'
CONFIGS = tiny_runs.configs_in(FOLDER)


def load(name):
    return Config.fromfile(FOLDER / f'{name}.py')


@pytest.mark.parametrize('name', [name for name in CONFIGS if not name.endswith('_converted')])
def test_every_norm_is_the_named_one_and_has_no_weight_decay(name):
    tiny_runs.check_norms_and_decay(load(name), 'LN' if '_ln_' in name else 'UN')


@pytest.mark.parametrize('name', ['swin_ln_classifier', 'swin_ln_handwriting', 'swin_ln_maskrcnn'])
def test_twins_differ_in_the_norm_alone(name):
    un, ln = load(name.replace('_ln_', '_un_')), load(name)
    assert recipe(un) == recipe(ln)
    for cfg, norm in ((un, 'un'), (ln, 'ln')):
        assert f'_{norm}_' in cfg.get('pretrained', f'_{norm}_')


@pytest.mark.parametrize('name', ['swin_un_classifier', 'swin_un_maskrcnn'])
def test_a_conversion_is_its_recipe_from_a_layer_norm_checkpoint(name):
    cfg, base = load(f'{name}_converted'), load(name)
    for config in (cfg, base):
        config.model.backbone.pop('init_cfg', None)
    assert cfg.model == base.model and cfg.train_dataloader == base.train_dataloader
    teacher, = map(HOOKS.build, cfg.custom_hooks)
    assert '_ln_' in teacher.checkpoint and cfg.load_from.startswith('work_dirs/converted/')


@pytest.mark.parametrize('name', ['swin_un_classifier', 'swin_un_maskrcnn'])
def test_exported_files_know_the_pipelines(name):
    steps_of(load(name).test_dataloader.dataset.pipeline)


@pytest.mark.slow
@pytest.mark.parametrize('name', [
    name if name == 'swin_un_maskrcnn' else pytest.param(name, marks=pytest.mark.grid) for name in CONFIGS
    if not name.endswith('_converted')])
def test_trains_and_tests_one_step(name, in_a_folder, tmp_path):
    wanted = {'coco/bbox_mAP'} if 'rcnn' in name else {'accuracy/top1'}
    if 'maskrcnn' in name:
        wanted.add('coco/segm_mAP')
    options = [*tiny_digits(load(name), tmp_path / 'data'), 'optim_wrapper.type=BFloat16OptimWrapper']
    state = tiny_runs.train_and_test_one_step(FOLDER / f'{name}.py', options, wanted)
    steps = {int(tensor) for key, tensor in state.items() if key.endswith('num_batches_tracked')}
    assert steps == (set() if '_ln_' in name else {1})


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'smallest'), [('swin_un_classifier', 1), ('t2t_un_classifier', 3)])
def test_backbones_take_odd_sizes(name, smallest):
    """The first window of T2T-ViT takes 3 pixels at least."""
    backbone = build_model(load_config(FOLDER / f'{name}.py', {'pretrained': None})).backbone.eval()
    with torch.no_grad():
        for size in ((smallest, smallest), (20, 20000)):
            outputs = backbone(torch.randn(1, 3, *size))
            assert all(output.numel() and output.isfinite().all() for output in outputs)
