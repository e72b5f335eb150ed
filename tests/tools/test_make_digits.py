import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
TOOL = ROOT / 'tools/dataset/make_digits.py'
TINY = ('--train-scenes', '2', '--val-scenes', '2', '--scene-size', '64', '--train-images', '10',
        '--val-images', '10', '--image-size', '16')


@pytest.fixture(scope='module')
def main():
    spec = importlib.util.spec_from_file_location('make_digits_tool', TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def error_of(main, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    # A string is printed on stderr and makes the exit status 1.
    assert isinstance(stop.value.code, str) and '\n' not in stop.value.code
    return stop.value.code


def test_makes_it_says_so_and_makes_it_only_once(main, tmp_path, capsys):
    out = tmp_path / 'digits'
    main(['--out', str(out), *TINY])
    printed = capsys.readouterr()
    assert not printed.err  # the bars are for terminals
    assert '2 train scenes' in printed.out and str(out / 'preview.png') in printed.out
    assert len(list(out.glob('imagenet/train/*/*.png'))) == 10
    stamp = (out / 'preview.png').stat().st_mtime_ns

    main(['--out', str(out), *TINY])
    printed = capsys.readouterr()
    assert 'already there' in printed.out and not printed.err
    assert (out / 'preview.png').stat().st_mtime_ns == stamp

    error = error_of(main, '--out', out, *TINY, '--seed', 1)
    assert str(out) in error and 'seed 0 instead of 1' in error and '--force' in error
    main(['--out', str(out), *TINY, '--seed', '1', '--force'])
    assert (out / 'preview.png').stat().st_mtime_ns != stamp


def test_dark_scenes_are_the_same_scenes_and_stay_there(main, tmp_path, capsys):
    out = tmp_path / 'digits'
    main(['--out', str(out), *TINY, '--dark'])
    assert 'coco_dark' in capsys.readouterr().out and (out / 'preview_dark.png').is_file()
    light, dark = out / 'coco', out / 'coco_dark'
    names = [{path.relative_to(folder) for path in folder.rglob('*') if path.is_file()} for folder in (light, dark)]
    assert names[0] == names[1] and len(names[0]) == 6
    for name in names[0]:
        same = (light / name).read_bytes() == (dark / name).read_bytes()
        assert same == (name.suffix == '.json')
        if not same:
            means = [np.asarray(Image.open(folder / name)).mean() for folder in (light, dark)]
            assert means[1] < 0.5 * means[0]
    main(['--out', str(out), *TINY])
    assert 'already there' in capsys.readouterr().out and dark.is_dir()


def test_dark_scenes_do_not_change_the_light_ones(main, tmp_path):
    for name, dark in (('a', ()), ('b', ('--dark', ))):
        main(['--out', str(tmp_path / name), *TINY, *dark])
    light = [{path.name: path.read_bytes() for path in (tmp_path / name / 'coco/train').iterdir()} for name in 'ab']
    assert light[0] == light[1]
    assert 'dark None instead of True' in error_of(main, '--out', tmp_path / 'a', *TINY, '--dark')


@pytest.mark.parametrize('option, value', [('--train-scenes', 0), ('--scene-size', 20), ('--seed', -1)])
def test_bad_option_is_named(main, tmp_path, option, value):
    error = error_of(main, '--out', tmp_path / 'digits', option, value)
    assert f'{option} must be a whole number from' in error and f'got {value}' in error
    assert not any(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(main, tmp_path):
    (tmp_path / 'file').write_text('')
    assert 'cannot write' in error_of(main, '--out', tmp_path / 'file' / 'digits', *TINY)
