"""One-line errors and atomic writes."""
from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from torch import nn

IMAGE_SUFFIXES = {'.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp'}


class PreflightError(Exception):
    """Something cannot start. Tools print its message in one line without a traceback, and exit with status 2."""
    status = 2


class RunError(Exception):
    """A run stopped early. Tools print its message in one line without a traceback, and exit with status 3."""
    status = 3


class LocalError(RunError):
    """A run stopped by an error that only this process has, such as an unreadable image."""


class Interrupted(RunError):
    """Ctrl+C stopped a run. Tools print its message in one line without a traceback, and exit with status 130."""
    status = 130


def one_line(error: Exception) -> str:
    """The message of an exception as one line."""
    if isinstance(error, OSError) and error.strerror:
        return f'{error.filename}: {error.strerror}' if error.filename else error.strerror
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
    if text.startswith('Caught ') and '\n' in text:
        # From a DataLoader's worker, with its traceback; the last line has the name and the message.
        return text.splitlines()[-1].removeprefix(f'{type(error).__module__}.{type(error).__name__}: ')
    return ' '.join(text.split())


def error_text(error: Exception) -> str:
    """An exception as one line, with its location if a config raised it, and the line of code if it has no message."""
    text = f'{type(error).__name__}: {one_line(error)}'.removesuffix(': ')
    frames = traceback.extract_tb(error.__traceback__)
    if frames and (frames[-1].name == '<module>' or not one_line(error)):
        frame = frames[-1]
        code = '' if frame.name == '<module>' else f': {frame.line}'
        return f'{text} ({frame.filename}, line {frame.lineno}{code})'
    return text


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean NAME?`, with the one of the `known` names that is most like `name`, or `.`."""
    found = get_close_matches(name, known, n=1)
    return f'; did you mean {found[0]}?' if found else '.'


def plural(number: int, noun: str) -> str:
    """`1 norm`, `2 norms`."""
    return f'{number} {noun}{"" if number == 1 else "s"}'


def check_module(model, name: str = 'model') -> None:
    """Raises a TypeError if an argument is not an `nn.Module`."""
    if not isinstance(model, nn.Module):
        why = '; eval() of some models returns None' if model is None else ''
        raise TypeError(f'{name}: must be an nn.Module, got {type(model).__name__}{why}')


def warn(message: str) -> None:
    """Prints a warning, once for all processes of a distributed run."""
    if is_first_process():
        print(f'warning: {message}', file=sys.stderr)


def is_first_process() -> bool:
    """Whether this is the only process, or the first of a distributed run."""
    return (os.environ.get('RANK') or os.environ.get('SLURM_PROCID') or '0') == '0'


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A context with the path of a new file next to `path`, which replaces `path` at the end of the `with` block.

    If the block fails, for example because the disk is full, the new file is removed, and `path` is unchanged. If the
    block writes nothing, nothing happens. Of a symbolic link, the file that it names is written.

    Raises:
        PreflightError: `path` exists and is no regular file, such as a folder or a device.
    """
    path = written_file(path)
    part = path.with_name(f'.{os.getpid()}.{path.name}')  # matplotlib and others read the suffix
    try:
        yield part
        if part.exists():
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def written_file(path: str | os.PathLike) -> Path:
    """The file that is written for a path: that which a symbolic link names. Raises the error of :func:`whole_file`."""
    found = Path(os.path.realpath(path))
    if found.is_symlink() or found.exists() and not found.is_file():
        kind = 'folder' if found.is_dir() else 'circular link' if found.is_symlink() else 'device or a pipe'
        raise PreflightError(f'{path}: must be a regular file, and is a {kind}.')
    return found


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a UTF-8 text file atomically."""
    with whole_file(path) as part:
        part.write_text(text, encoding='utf-8')


