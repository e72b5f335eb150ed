import pytest
from mmengine.config import Config

from tests import tiny_runs
from tests.test_configs import recipe

from .makers import tiny_photographs

FOLDER = tiny_runs.ROOT / 'projects/photographs/configs'


def load(name):
    return Config.fromfile(FOLDER / f'{name}.py')


@pytest.mark.parametrize('name', tiny_runs.configs_in(FOLDER))
def test_every_norm_is_the_named_one_and_has_no_weight_decay(name):
    tiny_runs.check_norms_and_decay(load(name), 'LN' if '_ln_' in name else 'UN')


def test_twins_differ_in_the_norm_alone():
    assert recipe(load('swin_un_photographs')) == recipe(load('swin_ln_photographs'))


def test_the_recorded_config_changes_nothing_else():
    cfg = load('swin_un_photographs_recorded').to_dict()
    assert cfg.pop('custom_hooks') == [dict(type='NormStatisticsHook')]
    assert cfg.pop('custom_imports')['imports'] == ['mmunorm', 'projects.digits.digits', 'projects.paper.paper']
    plain = load('swin_un_photographs').to_dict()
    plain.pop('custom_imports')
    assert cfg == plain


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize('name', tiny_runs.configs_in(FOLDER))
def test_trains_and_tests_one_step(name, in_a_folder, tmp_path):
    options = tiny_photographs(load(name), tmp_path / 'data')
    wanted = {'coco/bbox_mAP', 'coco/segm_mAP'} if 'rcnn' in name else {'accuracy/top1'}
    tiny_runs.train_and_test_one_step(FOLDER / f'{name}.py', options, wanted)
