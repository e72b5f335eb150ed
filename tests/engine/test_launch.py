import argparse
import importlib
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch.distributed.checkpoint import format_utils

from mmunorm.engine import (
    AverageStatisticsHook,
    DivergenceHook,
    LossScaleHook,
    RepeatableHook,
    UNWarmupHook,
    launch,
)
from mmunorm.engine.errors import PreflightError

MODEL = "model = dict(backbone=dict(type='A', init_cfg=None))\n"


def parse(add, *arguments):
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args(arguments)


def write(folder, text, name='a.py'):
    (folder / name).write_text(text)
    return str(folder / name)


def test_arguments_keep_their_stock_names():
    args = parse(launch.add_runner_arguments, '--work-dir', 'w', '--launcher', 'slurm', '--local-rank', '3',
                 '--cfg-options', 'a.b=[1,2]', 'c=None')
    assert (args.work_dir, args.launcher, args.local_rank) == ('w', 'slurm', 3)
    assert args.cfg_options == {'a.b': [1, 2], 'c': None}
    assert parse(launch.add_runner_arguments).launcher == 'none'


def test_options_without_a_value_are_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(launch.add_config_arguments, '--cfg-options', 'a=1', 'b')
    assert stop.value.code == 2
    assert "takes KEY=VALUE pairs, got 'b'" in capsys.readouterr().err


@pytest.mark.parametrize('text, said', [
    (None, 'there is no config file'),
    ('a = (', 'syntax'),
    ('a = 1\nb = unknown\n', r"NameError: name 'unknown' is not defined \(.*a\.py, line 2\)"),
    ("_base_ = ['./missing.py']\n", 'missing.py'),
    ("custom_imports = dict(imports=['no_such_module'])\n", 'no_such_module'),
    ('a = 1\n', 'has no `model`'),
    ("model = dict(norm_cfg=dict(type='UNX'))\n", r"model\.norm_cfg: there is no norm 'UNX'"),
])
def test_a_bad_config_is_one_line(tmp_path, text, said):
    path = tmp_path / 'a.py'
    if text is not None:
        path.write_text(text)
    with pytest.raises(PreflightError, match=f'(?i){said}') as caught:
        launch.load_config(str(path))
    assert '\n' not in str(caught.value) and 'a.py' in str(caught.value) or 'norm_cfg' in str(caught.value)


def test_options_are_merged_or_refused(tmp_path):
    path = write(tmp_path, MODEL + 'steps = [dict(a=1)]\n')
    assert launch.load_config(path, {'steps.0.a': 2}).steps[0].a == 2
    with pytest.raises(PreflightError, match='--cfg-options does not fit'):
        launch.load_config(path, {'steps.1.a': 2})


def test_pretrained_option_sets_the_backbone(tmp_path):
    path = write(tmp_path, "pretrained = 'a.pth'\nmodel = dict(backbone=dict(init_cfg=dict("
                           "type='Pretrained', checkpoint=pretrained, prefix='backbone.')))\n")
    assert launch.load_config(path).model.backbone.init_cfg.checkpoint == 'a.pth'
    init_cfg = launch.load_config(path, {'pretrained': 'b.pth'}).model.backbone.init_cfg
    assert init_cfg == dict(type='Pretrained', checkpoint='b.pth', prefix='backbone.')
    # The backbone's own initialization, whatever its class.
    assert 'init_cfg' not in launch.load_config(path, {'pretrained': None}).model.backbone
    for child, checkpoint in (("'c.pth'", 'c.pth'), ('None', None)):
        config = tmp_path / 'child.py'
        config.write_text(f"_base_ = ['./{Path(path).name}']\npretrained = {child}\n")
        init_cfg = launch.load_config(str(config)).model.backbone.get('init_cfg')
        assert (init_cfg and init_cfg.checkpoint) == checkpoint
    options = {'model.backbone.init_cfg.checkpoint': 'd.pth'}
    assert launch.load_config(path, options).model.backbone.init_cfg.checkpoint == 'd.pth'
    with pytest.raises(PreflightError, match='no backbone'):
        launch.load_config(write(tmp_path, "model = dict(type='A')\n"), {'pretrained': 'b.pth'})


def prepared(cfg, *arguments, config='configs/name.py'):
    args = parse(launch.add_runner_arguments, *arguments)
    args.config = config
    launch.prepare(cfg, args)
    return cfg


def test_work_dir_comes_from_the_argument_the_config_or_the_name():
    assert prepared(Config(dict(work_dir='c')), '--work-dir', 'w').work_dir == 'w'
    assert prepared(Config(dict(work_dir='c'))).work_dir == 'c'
    assert prepared(Config(dict(work_dir=None))).work_dir == 'work_dirs/name'


def test_dataloaders_get_what_the_stock_classification_tool_gives_them():
    def loader(scope, **settings):
        return prepared(Config(dict(default_scope=scope, test_dataloader=settings))).test_dataloader

    classifier = loader('mmpretrain', num_workers=2)
    assert classifier.collate_fn.type == 'default_collate' and classifier.persistent_workers is True
    assert loader('mmpretrain', num_workers=2, persistent_workers=False).persistent_workers is False
    assert loader('mmdet', num_workers=2) == dict(num_workers=2)
    # torch refuses persistent workers where there are none.
    assert loader('mmdet', num_workers=0, persistent_workers=True).persistent_workers is False


def test_amp_fits_the_device(monkeypatch):
    cfg = Config(dict(optim_wrapper=dict(type='OptimWrapper', dtype='float16')))
    monkeypatch.setattr(launch, 'get_device', lambda: 'cpu')
    launch.enable_amp(cfg)
    assert cfg.optim_wrapper == dict(type='BFloat16OptimWrapper')
    monkeypatch.setattr(launch, 'get_device', lambda: 'cuda')
    launch.enable_amp(cfg)
    assert cfg.optim_wrapper == dict(type='AmpOptimWrapper', loss_scale='dynamic')


def test_auto_scale_lr_needs_a_base():
    cfg = Config(dict(auto_scale_lr=dict(base_batch_size=16)))
    launch.enable_auto_scale_lr(cfg)
    assert cfg.auto_scale_lr == dict(base_batch_size=16, enable=True)
    with pytest.raises(PreflightError, match='base_batch_size'):
        launch.enable_auto_scale_lr(Config({}))


class TestResume:

    def cfg(self, tmp_path, **others):
        init_cfg = dict(type='Pretrained', checkpoint='missing.pth')
        return Config(dict(work_dir=str(tmp_path), model=dict(backbone=dict(init_cfg=init_cfg)), **others))

    def test_a_run_from_the_start_keeps_its_pretrained_weights(self, tmp_path):
        for resume in (None, 'auto'):  # nothing to resume from yet
            cfg = self.cfg(tmp_path)
            launch.set_resume(cfg, resume)
            assert cfg.model.backbone.init_cfg.checkpoint == 'missing.pth'
            assert not cfg.get('resume')

    @pytest.mark.parametrize('pointer', ['epoch_1.pth', 'epoch_9.pth'])
    def test_mmengine_does_not_take_what_was_refused(self, tmp_path, pointer, capsys):
        """It reads `last_checkpoint` itself where a run resumes from nothing in particular."""
        (tmp_path / 'epoch_1.pth').write_bytes(b'PK half a file')
        (tmp_path / 'last_checkpoint').write_text(str(tmp_path / pointer))
        cfg = self.cfg(tmp_path, load_from='start.pth', randomness=dict(seed=0))
        (tmp_path / 'start.pth').touch()
        cfg.load_from = str(tmp_path / 'start.pth')
        launch.set_resume(cfg, 'auto')
        assert 'the run starts at the beginning' in capsys.readouterr().err
        assert (cfg.resume, cfg.load_from) == (False, str(tmp_path / 'start.pth'))

    def test_a_config_without_a_seed_takes_the_checkpoints(self, tmp_path):
        checkpoint = tmp_path / 'epoch_1.pth'
        torch.save(dict(meta=dict(seed=17), state_dict={}), checkpoint)
        for randomness, seed in ((None, 17), (dict(seed=None, deterministic=True), 17), (dict(seed=0), 0)):
            cfg = self.cfg(tmp_path, **({} if randomness is None else dict(randomness=randomness)))
            launch.set_resume(cfg, str(checkpoint))
            assert cfg.randomness == dict(randomness or {}, seed=seed)
        # A run that only loads weights is another run.
        cfg = self.cfg(tmp_path, load_from=str(checkpoint))
        launch.set_resume(cfg, None)
        assert 'randomness' not in cfg

    def test_a_folder_is_a_checkpoint_of_sharded_training_alone(self, tmp_path):
        (tmp_path / 'epoch_2.pth').mkdir()
        for others in ({}, dict(runner_type='FlexibleRunner'),
                       dict(runner_type='FlexibleRunner', strategy=dict(type='DDPStrategy'))):
            cfg = self.cfg(tmp_path, load_from=str(tmp_path / 'epoch_2.pth'), **others)
            with pytest.raises(PreflightError, match='epoch_2.pth is a folder'):
                launch.set_resume(cfg, None)
        (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'epoch_2.pth'))
        for resume in ('auto', str(tmp_path / 'epoch_2.pth')):
            with pytest.raises(PreflightError, match='epoch_2.pth is a folder'):
                launch.set_resume(self.cfg(tmp_path), resume)
            cfg = self.cfg(tmp_path, runner_type='FlexibleRunner', strategy=dict(type='FSDPStrategy'))
            launch.set_resume(cfg, resume)
            assert (cfg.resume, cfg.load_from) == (True, str(tmp_path / 'epoch_2.pth'))

    def test_a_continued_run_does_not_need_them(self, tmp_path):
        checkpoint = tmp_path / 'epoch_1.pth'
        torch.save({}, checkpoint)
        (tmp_path / 'last_checkpoint').write_text(str(checkpoint))
        cfg = self.cfg(tmp_path, load_from='other.pth')
        launch.set_resume(cfg, 'auto')
        assert (cfg.resume, cfg.load_from, cfg.model.backbone.init_cfg) == (True, str(checkpoint), None)
        cfg = self.cfg(tmp_path)
        launch.set_resume(cfg, str(checkpoint))
        assert (cfg.resume, cfg.load_from, cfg.model.backbone.init_cfg) == (True, str(checkpoint), None)

    def test_a_missing_checkpoint_is_named(self, tmp_path):
        with pytest.raises(PreflightError, match='no checkpoint .*gone.pth'):
            launch.set_resume(self.cfg(tmp_path), str(tmp_path / 'gone.pth'))
        launch.check_checkpoint('https://example.org/a.pth')


def test_a_folder_of_torch_becomes_a_file_as_the_error_says(tmp_path):
    folder, file = tmp_path / 'epoch_1', tmp_path / 'epoch_1.pth'
    dcp.save(dict(state_dict=dict(weight=torch.arange(3.0))), checkpoint_id=folder)
    with pytest.raises(PreflightError) as caught:
        launch.read_checkpoint(str(folder))
    command = re.search(r'`python -m (\S+) dcp_to_torch (\S+) FILE`', str(caught.value))
    assert command[2] == str(folder)
    assert importlib.import_module(command[1]) is format_utils
    format_utils.dcp_to_torch_save(folder, file)
    assert launch.read_checkpoint(str(file))['state_dict']['weight'].tolist() == [0, 1, 2]


def test_one_process_prints_the_error(monkeypatch, capsys):
    @launch.command
    def main(argv=None):
        raise PreflightError('it is so')

    for rank, printed in (('0', 'error: it is so\n'), ('1', '')):
        monkeypatch.setenv('RANK', rank)
        with pytest.raises(SystemExit) as stop:
            main([])
        assert stop.value.code == 2
        assert capsys.readouterr().err == printed


def test_pytorch_launcher_without_torchrun(monkeypatch):
    monkeypatch.delenv('RANK', raising=False)
    with pytest.raises(PreflightError, match='dist_train.sh'):
        launch.build_runner(Config(dict(launcher='pytorch')))


def test_unregistered_types_are_one_line():
    with pytest.raises(PreflightError, match='NoSuchModel'), launch.clear_build_errors():
        raise KeyError('NoSuchModel is not in the mmengine::model registry.\nPlease check')
    with pytest.raises(KeyError), launch.clear_build_errors():
        raise KeyError('a key that a bug looked for')


def test_training_has_its_hooks_once_whatever_the_config_lists():
    for listed in (None, [], [dict(type='EMAHook')], [dict(type='UNWarmupHook', priority='LOW')],
                   [dict(type='mmunorm.LossScaleHook'), dict(type=UNWarmupHook), RepeatableHook()],
                   [dict(type='DivergenceHook', patience=3, factor=2.0)]):
        cfg = Config(dict(a=1) if listed is None else dict(custom_hooks=listed))
        launch.add_training_hooks(cfg)
        assert cfg.custom_hooks[:len(listed or [])] == (listed or [])
        classes = [type(hook) if isinstance(hook, Hook) else
                   hook['type'] if isinstance(hook['type'], type) else HOOKS.get(hook['type'].split('.')[-1])
                   for hook in cfg.custom_hooks]
        for cls in (UNWarmupHook, LossScaleHook, AverageStatisticsHook, RepeatableHook, DivergenceHook):
            assert classes.count(cls) == 1


@pytest.mark.parametrize('asked, kept', [(1, 2), (2, 2), (-1, -1), (None, None)])
def test_one_checkpoint_is_always_whole(asked, kept, capsys):
    hook = dict(type='CheckpointHook', **({} if asked is None else dict(max_keep_ckpts=asked)))
    cfg = Config(dict(default_hooks=dict(checkpoint=hook)))
    launch.keep_two_checkpoints(cfg)
    assert cfg.default_hooks.checkpoint.get('max_keep_ckpts') == kept
    assert ('keeping 2' in capsys.readouterr().err) == (asked == 1)
    launch.keep_two_checkpoints(Config(dict(a=1)))
