"""The tool that makes the digits."""
from pathlib import Path

import pytest

DIGITS = ('digits:make_digits', '--train-scenes', 2, '--val-scenes', 2, '--scene-size', 64, '--train-images', 10,
          '--val-images', 10, '--image-size', 16)


def test_digits_are_written_only_once(call):
    out = Path('data/digits')
    printed = call(*DIGITS)
    assert '2 train scenes' in printed and f'{out}/preview.png' in printed
    stamp = (out / 'preview.png').stat().st_mtime_ns
    assert 'already exists' in call(*DIGITS)
    error = call(*DIGITS, '--seed', 1)
    assert str(out) in error and 'seed 0 instead of 1' in error and '--force' in error
    assert (out / 'preview.png').stat().st_mtime_ns == stamp
    Path('file').touch()
    assert call(*DIGITS, '--out', 'file/digits').endswith('/file: File exists')


@pytest.mark.parametrize(('arguments', 'message'), [
    (('--train-scenes', 0), '--train-scenes must be a whole number from'),
    (('--scene-size', 20), '--scene-size must be a whole number from'),
    (('--seed', 2**32), '--seed must be a whole number from')])
def test_wrong_sizes_are_one_line(arguments, message, call):
    assert message in call(*DIGITS, *arguments)
    assert not Path('data').exists()
