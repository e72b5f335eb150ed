from types import SimpleNamespace

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


@pytest.mark.parametrize(('warm_up', 'message'), [
    (dict(by_epoch=False, end=50), ''), (dict(by_epoch=False, end=1000, start_factor=1.), ''),
    (dict(by_epoch=False, end=1000), 'takes 1000 steps, and the run 100: set param_scheduler.0.end, for example to 10'),
    (dict(end=3), 'takes 3 epochs, and the run 4: set param_scheduler.0.end, for example to 1')])
def test_a_schedule_that_is_longer_than_the_run(warm_up, message, capsys):
    schedule = [dict(type='LinearLR', **warm_up), dict(type='CosineAnnealingLR', begin=3)]
    runner = SimpleNamespace(cfg=Config(dict(param_scheduler=schedule)), max_epochs=4, max_iters=100)
    training.check_schedule(runner)
    assert capsys.readouterr().err.endswith(f'{message}.\n' if message else '')
    runner.max_epochs = 3
    with pytest.raises(PreflightError, match=r'param_scheduler\.1\.begin=3: this CosineAnnealingLR .* 3 epochs'):
        training.check_schedule(runner)
    training.check_schedule(SimpleNamespace(cfg=Config(dict(param_scheduler=None))))
    one = Config(dict(param_scheduler=[dict(type='LinearLR', end=1)]))
    training.check_schedule(SimpleNamespace(cfg=one, max_epochs=1, max_iters=100))
    assert ('.by_epoch=False, param_scheduler.0.convert_to_iter_based=False and param_scheduler.0.end in steps, for '
            'example to 10.' in capsys.readouterr().err)
