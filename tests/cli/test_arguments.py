import argparse
import warnings
from pathlib import Path

import pytest
import torch
from mmengine.config import Config

from mmunorm.cli.arguments import (
    add_config_arguments,
    add_runner_arguments,
    apply_runner_arguments,
    command,
    fraction,
    load_config,
    threads,
)
from mmunorm.utils import Interrupted, LocalError, PreflightError

MODEL = "model = dict(backbone=dict(type='A', init_cfg=None))\n"


def parse(add, *arguments):
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args(arguments)


def write(folder, text, name='a.py'):
    (folder / name).write_text(text)
    return str(folder / name)


def test_arguments_keep_their_stock_names(capsys):
    args = parse(add_runner_arguments, '--work-dir', 'w', '--launcher', 'slurm', '--local-rank', '3',
                 '--cfg-options', 'a.b=[1,2]', 'c=None')
    assert (args.work_dir, args.launcher, args.local_rank) == ('w', 'slurm', 3)
    assert args.cfg_options == {'a.b': [1, 2], 'c': None}
    assert parse(add_runner_arguments).launcher == 'none'
    with pytest.raises(SystemExit):
        parse(add_config_arguments, '--cfg-options', 'a=1', 'b')
    assert "takes KEY=VALUE pairs, got 'b'" in capsys.readouterr().err


@pytest.mark.parametrize('add, arguments, message', [
    (add_config_arguments, ['--cfg-options', 'a=[1,(2]'], 'Imbalanced brackets'),
    (add_config_arguments, ['--cfg-options', 'a=[dict(b=1,c=2)]'], 'takes no dict as a value'),
    (add_config_arguments, ['--cfg-options', 'a=[{"b":1}]'], 'takes no dict as a value'),
    (add_config_arguments, ['--cfg-options', 'a=[f(b,c)]'], 'maximum recursion depth'),
    (lambda parser: parser.add_argument('--a', type=threads), ['--a', '100000'], 'must be from 1 to 1024, got 100000'),
    (lambda parser: parser.add_argument('--a', type=fraction), ['--a', 'nan'], 'must be from 0 to 1, got nan'),
])
def test_wrong_values_are_refused(add, arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse(add, *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize('text, message', [
    ('a = 1\nb = unknown\n', r"NameError: name 'unknown' is not defined \(.*a\.py, line 2\)"),
    ("_base_ = ['./missing.py']\n", 'missing.py'),
    ("custom_imports = dict(imports=['no_such_module'])\n", 'no_such_module'),
    ('a = 1\n', 'has no `model`'),
    ("model = 'abc'\n", "has no `model`.*'abc'"),
])
def test_a_bad_config_is_one_line(tmp_path, text, message):
    path = tmp_path / 'a.py'
    path.write_text(text)
    with pytest.raises(PreflightError, match=f'(?i){message}') as caught:
        load_config(str(path))
    assert '\n' not in str(caught.value) and 'a.py' in str(caught.value)


def test_options_are_merged_or_refused(tmp_path):
    path = write(tmp_path, MODEL + 'steps = [dict(a=1)]\n')
    assert load_config(path, {'steps.0.a': 2}).steps[0].a == 2
    with pytest.raises(PreflightError, match='--cfg-options does not fit'):
        load_config(path, {'steps.1.a': 2})
    with pytest.raises(PreflightError, match='has no such key; did you mean steps?'):
        load_config(path, {'stepps': 2})
    with pytest.raises(PreflightError, match='pretrained=1: must be a checkpoint'):
        load_config(path, {'pretrained': 1})
    assert load_config(path, {'load_from': 'a.pth', 'mine.a': 2}).mine.a == 2  # keys that a config may have


def test_a_config_of_an_installed_package():
    cfg = load_config('mmunorm::configs/swin_t_un_imagenet.py')
    assert cfg.model.backbone.type == 'UNSwinTransformer'
    for path in ('mmunorm::configs/gone.py', 'no_such_package::a.py'):
        with pytest.raises(PreflightError, match='there is no config file'):
            load_config(path)


def test_pretrained_option_sets_the_backbone(tmp_path):
    path = write(tmp_path, "pretrained = 'a.pth'\nmodel = dict(backbone=dict(init_cfg=dict("
                           "type='Pretrained', checkpoint=pretrained, prefix='backbone.')))\n")
    assert load_config(path).model.backbone.init_cfg.checkpoint == 'a.pth'
    init_cfg = load_config(path, {'pretrained': 'b.pth'}).model.backbone.init_cfg
    assert init_cfg == dict(type='Pretrained', checkpoint='b.pth', prefix='backbone.')
    # The backbone's own initialization, for any class.
    assert 'init_cfg' not in load_config(path, {'pretrained': None}).model.backbone
    child = write(tmp_path, f"_base_ = ['./{Path(path).name}']\npretrained = 'c.pth'\n", 'child.py')
    assert load_config(child).model.backbone.init_cfg.checkpoint == 'c.pth'
    options = {'model.backbone.init_cfg.checkpoint': 'd.pth'}
    assert load_config(path, options).model.backbone.init_cfg.checkpoint == 'd.pth'
    with pytest.raises(PreflightError, match='no backbone'):
        load_config(write(tmp_path, "model = dict(type='A')\n"), {'pretrained': 'b.pth'})


def prepared(cfg, *arguments, config='configs/name.py'):
    args = parse(add_runner_arguments, *arguments)
    args.config = config
    apply_runner_arguments(cfg, args)
    return cfg


def test_work_dir_comes_from_the_argument_the_config_or_the_name():
    assert prepared(Config(dict(work_dir='c')), '--work-dir', 'w').work_dir == 'w'
    assert prepared(Config(dict(work_dir='c'))).work_dir == 'c'
    assert prepared(Config(dict(work_dir=None))).work_dir == 'work_dirs/name'


def test_dataloader_defaults_of_the_stock_tools():
    def loader(scope, **settings):
        return prepared(Config(dict(default_scope=scope, test_dataloader=settings))).test_dataloader

    classifier = loader('mmpretrain', num_workers=2)
    assert classifier.collate_fn.type == 'default_collate' and classifier.persistent_workers is True
    assert loader('mmpretrain', num_workers=2, persistent_workers=False).persistent_workers is False
    assert loader('mmdet', num_workers=2) == dict(num_workers=2)
    # torch refuses persistent workers where there are none.
    assert loader('mmdet', num_workers=0, persistent_workers=True).persistent_workers is False


@pytest.mark.parametrize(('error', 'rank', 'status', 'printed'), [
    (KeyboardInterrupt(), 0, 130, 'interrupted\n'), (Interrupted('after step 3'), 0, 130, 'error: after step 3\n'),
    (PreflightError('it is so'), 0, 2, 'error: it is so\n'),
    (PreflightError('of all'), 1, 2, ''), (LocalError('of one'), 1, 3, 'error: of one\n')])
def test_an_error_is_one_line_of_one_process(error, rank, status, printed, monkeypatch, capsys):
    @command
    def main(argv=None):
        raise error

    monkeypatch.setenv('RANK', str(rank))
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == status and capsys.readouterr().err == printed


def test_verbose_shows_where_an_error_was_raised(tmp_path, capsys):
    @command
    def main(argv=None):
        (tmp_path / 'missing').read_text()

    for argv, shown in (([], False), (['--verbose'], True)):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        *above, last = capsys.readouterr().err.splitlines()
        assert stop.value.code == 3 and last == f'error: {tmp_path / "missing"}: No such file or directory'
        assert bool(above) == shown == any('in main' in line for line in above)


def test_a_tool_flushes_denormal_numbers():
    def denormal(argv):
        return (torch.tensor([1e-30]) * 1e-10).item()

    assert command(denormal)([]) == 0 < denormal([])


def test_a_warning_of_jax_about_forks_is_not_shown(recwarn):
    @command
    def main(argv):
        warnings.warn('os.fork() was called. os.fork() is incompatible with multithreaded code', RuntimeWarning,
                      stacklevel=1)
        warnings.warn('another', RuntimeWarning, stacklevel=1)

    main([])
    assert [str(warning.message) for warning in recwarn] == ['another']
