"""Files that appear whole or not at all, and what the names of pictures end in."""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PICTURE_SUFFIXES = {'.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp'}


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """Gives the path of a new file beside `path`, which takes its place at the end of the `with` block.

    If the block fails, for example because the disk is full, the new file is removed, and what was at `path` stays.
    If the block writes nothing, nothing happens. A link to a file stays a link.
    """
    path = Path(os.path.realpath(path))
    part = path.with_name(f'.{os.getpid()}.{path.name}')  # matplotlib and others look at the suffix
    try:
        yield part
        if part.exists():
            part.replace(path)
    except OSError as error:
        if error.filename in (None, str(part)):  # the error of a full disk names no file
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a text file in UTF-8, whole or not at all."""
    with whole_file(path) as part:
        part.write_text(text, encoding='utf-8')
