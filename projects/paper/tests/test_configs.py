import pytest
from mmengine.config import Config

from tests import tiny_runs

FOLDER = tiny_runs.ROOT / 'projects/paper/configs'


@pytest.mark.parametrize('name', [name for name in tiny_runs.configs_in(FOLDER) if name.endswith('_recorded')])
def test_a_recorded_config_changes_nothing_else(name):
    cfg = Config.fromfile(FOLDER / f'{name}.py').to_dict()
    base = Config.fromfile(tiny_runs.ROOT / f'projects/digits/configs/{name.removesuffix("_recorded")}.py').to_dict()
    assert cfg.pop('custom_hooks') == [dict(type='NormStatisticsHook')]
    assert cfg.pop('custom_imports')['imports'] == [*base.pop('custom_imports')['imports'], 'projects.paper.paper']
    assert cfg == base
