import pytest

from .. import tiny_runs

TINY = ('--train-scenes', 2, '--val-scenes', 2, '--scene-size', 64, '--train-images', 10, '--val-images', 10,
        '--image-size', 16)


@pytest.fixture
def call(capsys):
    """Runs the tool and gives what it prints, or the one line of an error and its status."""
    tool = tiny_runs.load_tool('dataset/make_digits')

    def run(*arguments):
        try:
            tiny_runs.call(tool, *arguments)
        except SystemExit as stop:
            return stop.code, capsys.readouterr().err.splitlines()[-1]
        return capsys.readouterr().out

    return run


def test_makes_it_says_so_and_makes_it_only_once(call, tmp_path):
    out = tmp_path / 'digits'
    printed = call('--out', out, *TINY, '--dark')
    assert '2 train scenes' in printed and f'{out}/preview.png' in printed and f'{out}/coco_dark' in printed
    stamp = (out / 'preview.png').stat().st_mtime_ns
    assert 'already there' in call('--out', out, *TINY)
    status, error = call('--out', out, *TINY, '--seed', 1)
    assert status == 2 and str(out) in error and 'seed 0 instead of 1' in error and '--force' in error
    assert (out / 'preview.png').stat().st_mtime_ns == stamp


@pytest.mark.parametrize('option, value', [('--train-scenes', 0), ('--scene-size', 20), ('--seed', -1)])
def test_bad_option_is_named(call, tmp_path, option, value):
    status, error = call('--out', tmp_path / 'digits', option, value)
    assert status == 2 and f'error: {option} must be a whole number from' in error and f'got {value}.' in error
    assert not any(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(call, tmp_path):
    (tmp_path / 'file').touch()
    assert call('--out', tmp_path / 'file/digits', *TINY) == (3, f'error: {tmp_path}/file: File exists')
