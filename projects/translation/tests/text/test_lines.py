import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmunorm.utils import PreflightError
from projects.translation.translation.text.lines import check_line_counts, evenly_spaced, read_lines


def test_only_a_line_feed_ends_a_line(tmp_path):
    (tmp_path / 'a').write_bytes('\ufeffà b\r\nc\u2028d\x0be\n  f'.encode())
    assert list(read_lines(tmp_path / 'a')) == ['à b', 'c\u2028d\x0be', 'f']


@pytest.mark.parametrize('content, message', [
    (b'a\n\nb\n', 'a, line 2: an empty line'), (b'a\nb\n \t\n', 'line 3: an empty line'),
    ('a\nè\n'.encode('latin-1'), 'line 2: not UTF-8'), (None, 'cannot read the text .*a: No such file')])
def test_errors_name_the_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / 'a').write_bytes(content)
    with pytest.raises(PreflightError, match=message):
        list(read_lines(tmp_path / 'a'))


def test_a_translation_may_be_empty(tmp_path):
    (tmp_path / 'a').write_text('a\n\nb\n')
    assert list(read_lines(tmp_path / 'a', allow_empty=True)) == ['a', '', 'b']


def test_unequal_counts_are_named():
    check_line_counts([('a', 2), ('b', 2)])
    with pytest.raises(PreflightError, match='a has 2 lines and b has 3 lines'):
        check_line_counts([('a', 2), ('b', 3)])
    with pytest.raises(PreflightError, match='a is empty'):
        check_line_counts([('a', 0), ('b', 0)])


@given(st.integers(1, 500), st.integers(1, 500))
def test_spread_is_even(count, number):
    lines = evenly_spaced(count, number)
    assert len(lines) == min(count, number) and lines[0] >= 0 and lines[-1] < count
    distances = {b - a for a, b in zip(lines, lines[1:], strict=False)}
    assert not distances or min(distances) >= 1 and max(distances) - min(distances) <= 1
