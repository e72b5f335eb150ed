"""Pairs of sentences, and batches of them."""
from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from mmengine.logging import print_log
from mmengine.registry import DATASETS, FUNCTIONS
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ...utils import PreflightError
from .ids import PAD
from .lines import check_equally_many
from .subwords import Subwords
from .token_ids import TokenIds


@DATASETS.register_module()
class TranslationDataset(Dataset):
    """Two text files, of which a line of one is the translation of that line of the other.

    Items are dicts: `source` and `target`, int64 arrays of subword ids with EOS at the end, and `index`, the number
    of the line from 0. The texts may be of any size: see :class:`TokenIds`.

    Args:
        source (str | os.PathLike): file in UTF-8, one sentence a line.
        target (str | os.PathLike): the same in the other language.
        subwords (str | os.PathLike): subword model of both.
        data_root (str | os.PathLike): the folder that these paths begin in. Defaults to ''.
        max_length (int, optional): leave pairs out with more ids than this on a side, EOS counted. For training: a
            test set has to keep all. Defaults to None, for all pairs.

    Attributes:
        lengths (numpy.ndarray): ids of both sides of each item, int64 `(n, 2)`.
        subwords (Subwords): the subword model.

    Raises:
        PreflightError: a file cannot be used, the two have not equally many lines, or no pair is short enough.
    """

    def __init__(self, source: str | os.PathLike, target: str | os.PathLike, subwords: str | os.PathLike,
                 data_root: str | os.PathLike = '', max_length: int | None = None):
        source, target, subwords = (os.path.join(data_root, path) for path in (source, target, subwords))
        self.metainfo = dict(source=source, target=target)
        self.subwords = Subwords(subwords)
        self._source, self._target = TokenIds(source, self.subwords), TokenIds(target, self.subwords)
        check_equally_many([(source, len(self._source)), (target, len(self._target))])
        self.lengths = np.stack([self._source.lengths, self._target.lengths], axis=1)
        self._lines = np.arange(len(self.lengths))
        if max_length is not None:
            self._lines = np.flatnonzero(self.lengths.max(axis=1) <= max_length)
            left_out = len(self.lengths) - len(self._lines)
            if not len(self._lines):
                raise PreflightError(f'each pair of {source} and {target} has more than max_length={max_length} '
                                     'subwords on a side.')
            if left_out:
                print_log(f'{source}: {left_out} of {len(self.lengths)} pairs are left out, with more than '
                          f'max_length={max_length} subwords on a side.', 'current')
            self.lengths = self.lengths[self._lines]

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
