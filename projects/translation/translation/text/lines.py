"""Plain text, one sentence a line."""
from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from mmunorm.utils import PreflightError

_LANGUAGE_TOKEN = re.compile(r'<2[a-z]{2,3}>(?= )')


def language_token(line: str) -> str:
    """The language token at the start of a source sentence, such as '<2it>'; '' if there is none.

    It is the language of the translation, in texts with several languages.
    """
    token = _LANGUAGE_TOKEN.match(line)
    return token[0] if token else ''


def read_lines(path: str | os.PathLike, allow_empty: bool = False) -> Iterator[str]:
    """Yields the lines of a UTF-8 file without surrounding white space.

    Args:
        path: the file. Only a line feed ends a line.
        allow_empty: whether a line may be empty, such as that of a bad translation.

    Raises:
        PreflightError: the file does not exist, or a line is empty or not UTF-8.
    """
    try:
        file = open(path, 'rb')  # noqa: SIM115  closed below
    except OSError as error:
        raise PreflightError(f'cannot read the text {path}: {error.strerror}.') from error
    with file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode('utf-8-sig' if number == 1 else 'utf-8').strip()
            except UnicodeDecodeError as error:
                raise PreflightError(f'{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start} of the '
                                     'line); convert the file, for example with iconv.') from error
            if not text and not allow_empty:
                raise PreflightError(f'{path}, line {number}: an empty line; remove it and the same line of the '
                                     'other side.')
            yield text


def check_line_counts(counts: Sequence[tuple[str | os.PathLike, int]]) -> None:
    """Checks that files, given with their numbers of lines, have the same number of lines.

    Raises:
        PreflightError: the numbers differ, or are 0.
    """
    if len({count for _, count in counts}) > 1:
        raise PreflightError('each line must have its translation on the line of the same number, but '
                             + ' and '.join(f'{path} has {count} lines' for path, count in counts) + '.')
    if counts[0][1] == 0:
        raise PreflightError(f'{counts[0][0]} is empty.')


def evenly_spaced(count: int, number: int) -> list[int]:
    """At most `number` evenly spaced indices from 0 to `count` - 1."""
    number = min(count, number)
    return [(2 * k + 1) * count // (2 * number) for k in range(number)]
