import pytest
from mmengine.config import Config

from mmunorm.cli import training
from mmunorm.engine import OfflineNormHook, SyncNormsHook
from mmunorm.utils import PreflightError

from .. import tiny_runs


def test_auto_scale_lr_needs_a_base():
    cfg = Config(dict(auto_scale_lr=dict(base_batch_size=16)))
    enable = tiny_runs.load_tool('train').enable_auto_scale_lr
    enable(cfg)
    assert cfg.auto_scale_lr == dict(base_batch_size=16, enable=True)
    with pytest.raises(PreflightError, match='base_batch_size'):
        enable(Config({}))


def test_pytorch_launcher_without_torchrun(monkeypatch):
    monkeypatch.delenv('RANK', raising=False)
    with pytest.raises(PreflightError, match='dist_train.sh'):
        training.build_runner(Config(dict(launcher='pytorch')))


def test_training_has_its_hooks_once():
    added = [dict(type='OfflineNormHook'), dict(type='SyncNormsHook')]
    for listed, new in ((None, added), ([], added), ([dict(type='EMAHook')], added),
                        ([dict(type='OfflineNormHook', priority='LOW')], added[1:]),
                        ([dict(type='mmunorm.OfflineNormHook'), SyncNormsHook()], []),
                        ([dict(type=OfflineNormHook)], added[1:])):
        cfg = Config(dict(a=1) if listed is None else dict(custom_hooks=listed))
        training.add_hooks(cfg, 'OfflineNormHook', 'SyncNormsHook')
        assert cfg.custom_hooks == [*(listed or []), *new]
