"""Configs of strangers: whatever they say, nothing runs."""
import sys

import pytest
from mmengine.config import Config
from mmengine.registry import MODELS

from mmunorm.checkpoints.plain import read_config_text, registered_types_only
from mmunorm.utils import PreflightError

PLAIN = dict(
    default_scope='mmpretrain', empty=None, yes=True,
    model=dict(type='A', rate=-1.5, small=1e-6, steps=[dict(a=1), (2, 'three')], **{'0.a-b': dict()}),
    words='dict(a=1)\n"quoted"')


def test_what_mmengine_writes_is_read_as_it_was():
    assert read_config_text(Config(PLAIN).pretty_text) == PLAIN
    assert read_config_text('') == {}


@pytest.mark.parametrize('line', [
    'import os', "open('marker', 'w')", "a = open('marker', 'w')", "a = dict(b=open('marker', 'w'))",
    'a = [1 for i in b]', "a = dict([('b', 1)])",
    'a.b = 1', 'a = c = 1', 'a = b', 'a: int = 1', "a = f'{open}'", 'a = (', 'a = dict(**b)',
    'a = dict(**3)', f"a = {'[' * 5000}{']' * 5000}", f"a = {'-' * 50000}1",
])
def test_code_is_refused_by_line(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r'line \d of the config is not `NAME = VALUE`'):
        read_config_text(f'first = 1\n{line}\n')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('cfg', [
    dict(type='os.mkdir', path='marker'),
    dict(type='os', name='marker'),
    dict(type='stranger.Model'),
    dict(type='Linear', _scope_='stranger', in_features=1, out_features=1),
    dict(type='stranger.nested.Linear', in_features=1, out_features=1),
])
def test_only_registered_types_are_built(cfg, tmp_path, monkeypatch):
    """`stranger` is a package beside the file."""
    (tmp_path / 'stranger').mkdir()
    for name in ('__init__', 'registry', 'nested'):
        (tmp_path / 'stranger' / f'{name}.py').write_text("import os\nos.mkdir('marker')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with registered_types_only():
        try:
            assert type(MODELS.build(dict(cfg))).__name__ == 'Linear'
        except KeyError as error:
            assert 'is not in' in str(error)
    assert not (tmp_path / 'marker').exists() and 'stranger' not in sys.modules


@pytest.mark.parametrize('cfg', [
    dict(type='CameraMotionCompensation', warp_mode="__import__('os').mkdir('marker')"),
    dict(type='KnowledgeDistillationSingleStageDetector', teacher_config='teacher.py', backbone=dict(
        type='ResNet', depth=18), neck=dict(type='FPN', in_channels=[64], out_channels=8, num_outs=1),
         bbox_head=dict(type='RetinaHead', num_classes=2, in_channels=8)),
])
def test_registered_types_that_run_what_they_are_given(cfg, tmp_path, monkeypatch):
    import mmdet.models  # noqa: F401
    from mmdet.registry import MODELS as DETECTORS
    from mmdet.registry import TASK_UTILS
    (tmp_path / 'teacher.py').write_text("import os\nos.mkdir('marker')\n")
    monkeypatch.chdir(tmp_path)
    kind = TASK_UTILS if 'warp_mode' in cfg else DETECTORS
    with registered_types_only(), pytest.raises(PreflightError, match='the config names'):
        kind.build(dict(cfg))
    assert not (tmp_path / 'marker').exists()
