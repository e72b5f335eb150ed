"""The subword ids of a text, kept in a file beside it and mapped into memory."""
from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from glob import escape
from itertools import islice
from pathlib import Path

import numpy as np
from mmengine import dist
from tqdm import tqdm

from ...utils import PreflightError, whole_file
from .ids import EOS
from .lines import read_lines
from .subwords import Subwords

CHUNK = 1 << 24  # ids that are searched for line ends at once
LINES = 10_000  # lines that are encoded at once


class TokenIds:
    """The ids of a text's lines, each with EOS at its end. Item i is line i, an int64 array.

    A text is encoded once for each subword model. The ids go into a file beside it, of 2 bytes an id, or 4 with more
    than 65,536 subwords. In a distributed run, the first process writes it, and the others wait. The file is found
    again by the size and time of the text and the content of the subword model.

    Args:
        text (str | os.PathLike): file of one sentence a line, of any size.
        subwords (Subwords): the subword model.

    Attributes:
        lengths (numpy.ndarray): ids of each line, with EOS; int64.

    Raises:
        PreflightError: the text is missing, has an empty line or is not UTF-8, or nothing can be written beside it.
    """

    def __init__(self, text: str | os.PathLike, subwords: Subwords):
        dtype = np.uint16 if len(subwords) <= 1 << 16 else np.int32
        text = Path(text)
        # The first process of all, then of each machine whose disk does not have the file yet.
        for mine in (dist.is_main_process(), os.environ.get('LOCAL_RANK', '0') == '0'):
            if mine:
                _encode_once(text, subwords, dtype)
            dist.barrier()
        path = _ids_path(text, subwords)
        self._ids = np.memmap(path, dtype, 'r') if path.stat().st_size else np.empty(0, dtype)
        # EOS never comes out of a text, so it marks the ends.
        ends = [start + 1 + np.flatnonzero(self._ids[start:start + CHUNK] == EOS)
                for start in range(0, len(self._ids), CHUNK)]
        self._ends = np.concatenate([np.zeros(1, np.int64), *ends])
        self.lengths = np.diff(self._ends)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        return np.array(self._ids[self._ends[i]:self._ends[i + 1]], np.int64)


def _ids_path(text: Path, subwords: Subwords) -> Path:
    try:
        stat = text.stat()
    except OSError as error:
        raise PreflightError(f'cannot read the text {text}: {error.strerror}.') from error
    stamp = hashlib.sha256(f'{stat.st_size} {stat.st_mtime_ns}'.encode()).hexdigest()
    return text.with_name(f'{text.name}.{stamp[:8]}-{subwords.digest[:8]}.ids')


def _encode_once(text: Path, subwords: Subwords, dtype: type) -> None:
    path = _ids_path(text, subwords)
    if path.exists():
        return
    try:
        with whole_file(path) as part, open(part, 'wb') as file:
            lines = _with_progress(text)
            while batch := list(islice(lines, LINES)):
                np.array([i for ids in subwords.encode_all(batch) for i in (*ids, EOS)], dtype).tofile(file)
    except OSError as error:
        raise PreflightError(f'cannot write {error.filename}: {error.strerror}; subword ids are kept beside the text, '
                             'so put it, or a link to it, into a folder that can be written.') from error
    # Those of the text before it was changed.
    stamp = path.name.removeprefix(text.name)[:9]
    digits = '[0-9a-f]' * 8  # or the files of another text would do as well, whose name goes on with a dot
    for other in text.parent.glob(f'{escape(text.name)}.{digits}-{digits}.ids'):
        if not other.name.removeprefix(text.name).startswith(stamp):
            other.unlink(missing_ok=True)


def _with_progress(text: Path) -> Iterator[str]:
    with tqdm(desc=f'encoding {text}', total=text.stat().st_size, unit='B', unit_scale=True, disable=None) as bar:
        for line in read_lines(text):
            yield line
            bar.update(len(line.encode()) + 1)
