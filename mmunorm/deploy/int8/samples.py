"""Pictures that the ranges of INT8 are taken from."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from ...errors import PreflightError


class Samples(Sequence):
    """Batches of an exported model's inputs, which become floating point only when they are asked for.

    Args:
        pictures (Sequence[Tensor]): uint8 `(3, h, w)`, of a data loader.
        arrays (Callable): makes some of them a batch, as :meth:`ExportedModel.arrays` does.
        batch (int): pictures at once. Those that do not fill the last batch are left out.

    Raises:
        PreflightError: there are fewer pictures than a batch.
    """

    def __init__(self, pictures: Sequence[Tensor], arrays: Callable[[Sequence[Tensor]], tuple[np.ndarray, ...]],
                 batch: int):
        if len(pictures) < batch:
            raise PreflightError(f'--int8 needs at least as many training pictures as a batch has, got {len(pictures)} '
                                 f'for --batch {batch}.')
        self._pictures, self._arrays, self._batch = pictures, arrays, batch

    def __len__(self) -> int:
        return len(self._pictures) // self._batch

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = self._pictures[index * self._batch:(index + 1) * self._batch]
        return tuple(array.astype(np.float32) for array in self._arrays(part))
