"""Pairs of sentences as subword ids, cached in files next to the texts and memory-mapped."""
from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from glob import escape
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from mmengine import dist
from mmengine.logging import print_log
from mmengine.registry import DATASETS, FUNCTIONS
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm import tqdm

from mmunorm.utils import PreflightError, whole_file

from .ids import EOS, PAD
from .lines import check_line_counts, read_lines
from .subwords import Subwords, check_vocabulary

LINES = 10_000  # lines that are encoded at once


@DATASETS.register_module()
class TranslationDataset(Dataset):
    """Two text files with parallel lines, a sentence and its translation.

    Items are dicts: `source` and `target`, int64 arrays of subword ids with EOS at the end, and `index`, the line
    number from 0. The texts may be of any size: see :class:`TokenIds`.

    Args:
        source (str | os.PathLike): UTF-8 file with one sentence per line.
        target (str | os.PathLike): the file of the other language.
        subwords (str | os.PathLike): subword model of both.
        data_root (str | os.PathLike): the root folder of these paths. Defaults to ''.
        max_length (int, optional): drop pairs with more ids than this on a side, including EOS. Only for training,
            because a test set must keep all pairs. Defaults to None, for all pairs.

    Attributes:
        lengths (numpy.ndarray): ids of both sides of each item, int64 `(n, 2)`.
        subwords (Subwords): the subword model.

    Raises:
        PreflightError: a file cannot be used, the numbers of lines differ, or no pair is short enough.
    """

    def __init__(self, source: str | os.PathLike, target: str | os.PathLike, subwords: str | os.PathLike,
                 data_root: str | os.PathLike = '', max_length: int | None = None):
        source, target, subwords = (os.path.join(data_root, path) for path in (source, target, subwords))
        self.metainfo = dict(source=source, target=target)
        self.subwords = Subwords(subwords)
        self._source, self._target = TokenIds(source, self.subwords), TokenIds(target, self.subwords)
        check_line_counts([(source, len(self._source.lengths)), (target, len(self._target.lengths))])
        lengths = np.stack([self._source.lengths, self._target.lengths], axis=1)
        self._lines = np.arange(len(lengths))
        if max_length is not None:
            self._lines = np.flatnonzero(lengths.max(axis=1) <= max_length)
            left_out = len(lengths) - len(self._lines)
            if not len(self._lines):
                raise PreflightError(f'each pair of {source} and {target} has more than max_length={max_length} '
                                     'subwords on a side.')
            if left_out:
                print_log(f'{source}: {left_out} of {len(lengths)} pairs are dropped, with more than '
                          f'max_length={max_length} subwords on a side.', 'current')
        self.lengths = lengths[self._lines]

    @staticmethod
    def check_model(cfg: dict, model: dict) -> None:
        """Checks that a model's vocabulary is that of the subwords of a data set's config, before a run."""
        path = os.path.join(cfg.get('data_root') or '', cfg['subwords'])
        check_vocabulary(len(Subwords(path)), model['backbone']['vocab_size'])

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: int) -> dict:
        line = int(self._lines[i])
        return dict(source=self._source[line], target=self._target[line], index=line)


@FUNCTIONS.register_module()
def pad_translations(items: Sequence[dict]) -> dict[str, Tensor]:
    """Joins items of a :class:`TranslationDataset`.

    Returns:
        dict[str, Tensor]: int64 `source` `(n, s)` and `target` `(n, t)`, with PAD on the right, and `index` `(n,)`.
    """
    batch = {side: pad_sequence([torch.from_numpy(item[side]) for item in items], batch_first=True, padding_value=PAD)
             for side in ('source', 'target')}
    return dict(batch, index=torch.tensor([item['index'] for item in items]))


class TokenIds:
    """The ids of a text's lines, each with EOS at its end. Item i is line i, an int64 array.

    A text is encoded once for each subword model. The ids are cached in a file next to it, with 2 bytes per id, or 4
    for more than 65,536 subwords. In a distributed run, the first process writes it, and the others wait. The cache is
    identified by the size and time of the text and the content of the subword model. `lengths` are the numbers of ids.

    Raises:
        PreflightError: the text is missing, has an empty line or is not UTF-8, or its folder is not writable.
    """

    def __init__(self, text: str | os.PathLike, subwords: Subwords):
        text = Path(text)
        dtype = np.uint16 if len(subwords) <= 1 << 16 else np.int32
        try:
            stat = text.stat()
        except OSError as error:
            raise PreflightError(f'cannot read the text {text}: {error.strerror}.') from error
        stamp = hashlib.sha256(f'{stat.st_size} {stat.st_mtime_ns}'.encode()).hexdigest()[:8]
        path = text.with_name(f'{text.name}.{stamp}-{subwords.digest[:8]}.ids')
        # The first process, then the first one of each machine whose disk does not have the file yet.
        for writes in (dist.is_main_process(), os.environ.get('LOCAL_RANK', '0') == '0'):
            if writes and not path.exists():
                _encode(text, subwords, path, dtype)
                _remove_ids_before(text, stamp)
            dist.barrier()
        self._ids = np.memmap(path, dtype, 'r') if path.stat().st_size else np.empty(0, dtype)
        # EOS does not occur in a text, so it marks the ends.
        self._ends = np.concatenate([[0], np.flatnonzero(self._ids == EOS) + 1])
        self.lengths = np.diff(self._ends)

    def __getitem__(self, i: int) -> np.ndarray:
        return np.array(self._ids[self._ends[i]:self._ends[i + 1]], np.int64)


def _encode(text: Path, subwords: Subwords, path: Path, dtype: type) -> None:
    try:
        with whole_file(path) as part, open(part, 'wb') as file, tqdm(
                desc=f'encoding {text}', total=text.stat().st_size, unit='B', unit_scale=True, disable=None) as bar:
            lines = read_lines(text)
            while batch := list(islice(lines, LINES)):
                np.array([i for ids in subwords.encode(batch) for i in (*ids, EOS)], dtype).tofile(file)
                bar.update(sum(len(line.encode()) + 1 for line in batch))
    except OSError as error:
        raise PreflightError(f'cannot write {error.filename}: {error.strerror}; subword ids are cached next to the '
                             'text, so put it, or a link to it, into a writable folder.') from error


def _remove_ids_before(text: Path, stamp: str) -> None:
    """Removes outdated caches of a text."""
    digits = '[0-9a-f]' * 8  # else files of another text would match, whose name continues with a dot
    for other in text.parent.glob(f'{escape(text.name)}.{digits}-{digits}.ids'):
        if not other.name.startswith(f'{text.name}.{stamp}-'):
            other.unlink(missing_ok=True)
