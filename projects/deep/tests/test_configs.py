import pytest
from mmengine.config import Config
from mmengine.hub import get_config
from mmpretrain.models import VisionTransformer

from mmunorm.cli.arguments import load_config
from mmunorm.config.models import build_model
from projects.digits.tests.data import tiny_digits
from tests import tiny_runs
from tests.test_configs import without_scopes

FOLDER = tiny_runs.ROOT / 'projects/deep/configs'


@pytest.mark.parametrize('name', tiny_runs.configs_in(FOLDER))
def test_every_norm_is_the_named_one_and_has_no_weight_decay(name):
    tiny_runs.check_norms_and_decay(Config.fromfile(FOLDER / f'{name}.py'), 'UN')


def test_the_deep_deit_is_the_stock_one_with_another_norm():
    cfg, stock = (without_scopes(cfg.to_dict()) for cfg in (
        Config.fromfile(FOLDER / 'deit_s_un_imagenet.py'), get_config('mmpretrain::deit/deit-small_4xb256_in1k.py')))
    backbone, other = cfg['model'].pop('backbone'), stock['model'].pop('backbone')
    assert backbone.pop('residual_cfg') == dict(type='PreNorm') and backbone.pop('norm_cfg')['type'] == 'UN'
    assert backbone.pop('arch') == VisionTransformer.arch_zoo['deit-small'] and other.pop('arch') == 'deit-small'
    assert (backbone.pop('type'), other.pop('type')) == ('UNVisionTransformer', 'VisionTransformer')
    assert backbone == other
    for config in (cfg, stock):
        config['default_hooks'].pop('checkpoint')
        config.pop('custom_imports', None)
    assert cfg == stock
    optimizer = Config.fromfile(FOLDER / 'deit_s_un_imagenet.py').optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 1e-3, 0.05)


@pytest.mark.parametrize('name', ['vit_un_classifier', 'deit_s_un_imagenet'])
def test_depth_and_scheme_are_options(name):
    options = {'arch.num_layers': 15, 'residual_cfg.type': 'BranchNorm', 'residual_cfg.warmup_iters': 9}
    backbone = build_model(load_config(f'{FOLDER}/{name}.py',
                                       {f'model.backbone.{key}': value for key, value in options.items()})).backbone
    assert len(backbone.layers) == 15 and backbone.layers[14].residual2.warmup_iters == 9


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'options'), [
    ('deit_s_un_imagenet', [
        'model.backbone.arch.num_layers=2', 'model.backbone.arch.embed_dims=24', 'model.backbone.arch.num_heads=2',
        'model.backbone.arch.feedforward_channels=24', 'model.head.in_channels=24',
        'model.backbone.residual_cfg.type=BranchNorm', 'model.backbone.residual_cfg.warmup_iters=9']),
    pytest.param('vit_un_classifier', [], marks=pytest.mark.grid),
    pytest.param('swin_t_un_res_post_norm_imagenet', [], marks=pytest.mark.grid)])
def test_trains_and_tests_one_step(name, options, in_a_folder, tmp_path):
    config = FOLDER / f'{name}.py'
    tiny = tiny_digits if name == 'vit_un_classifier' else tiny_runs.tiny_data
    options = [*tiny(Config.fromfile(config), tmp_path / 'data'), *options]
    state = tiny_runs.train_and_test_one_step(config, options, {'accuracy/top1'})
    updates = [int(tensor) for key, tensor in state.items() if key.endswith('update_clock.updates')]
    assert updates == [1] * ('deit' in name)
