import pytest
from mmengine.config import Config

from mmunorm.cli.arguments import load_config
from projects.digits.tests.data import make_digits
from tests import tiny_runs

FOLDER = tiny_runs.ROOT / 'projects/low_light/configs'


@pytest.mark.parametrize('name', tiny_runs.configs_in(FOLDER))
def test_every_norm_is_the_named_one_and_has_no_weight_decay(name):
    if name.startswith('acdc/'):
        pytest.importorskip('mmseg')
    norm = 'LN' if '_ln_' in name else 'UN'
    tiny_runs.check_norms_and_decay(Config.fromfile(FOLDER / f'{name}.py'), norm, least=2)


def test_norm_reaches_the_enhancer_and_its_weights():
    cfg = load_config(f'{FOLDER}/digits/swin_un_maskrcnn_dark_joint.py', norm='LN')
    assert cfg.model.enhancer.norm_cfg == cfg.model.backbone.norm_cfg == dict(type='LN')
    assert cfg.model.enhancer.init_cfg.checkpoint == 'work_dirs/iat_ln_enhancer/epoch_4.pth'
    assert cfg.model.backbone.init_cfg.checkpoint == 'work_dirs/swin_ln_classifier/epoch_8.pth'


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'enhanced', 'metric'), [
    ('iat_un_enhancer', {1}, 'enhancement/PSNR'), ('swin_un_maskrcnn_dark_joint', {1}, 'coco/bbox_mAP'),
    pytest.param('swin_un_maskrcnn_dark_frozen', {0, 1}, 'coco/bbox_mAP', marks=pytest.mark.grid)])
def test_trains_and_tests_one_step(name, enhanced, metric, in_a_folder, tmp_path):
    """A frozen enhancer's norms count no step."""
    pytest.importorskip('torchmetrics')
    make_digits(tmp_path / 'data/digits')
    tiny_runs.call('low_light:make_dark')
    config = FOLDER / f'digits/{name}.py'
    cfg = Config.fromfile(config)
    if metric.startswith('coco'):
        root = tmp_path / 'data/digits_dark'
        options = [*tiny_runs.run_options(cfg, root), *tiny_runs.coco_options(cfg, root, 'instances_val.json'),
                   'model.enhancer.init_cfg=None']
    else:
        options = tiny_runs.run_options(cfg, tmp_path / 'data')
    state = tiny_runs.train_and_test_one_step(config, options, {metric})
    assert {int(tensor) for key, tensor in state.items() if key.endswith('num_batches_tracked')} == enhanced
