"""Pictures that the ranges of INT8 are taken from."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor, nn

from ...utils import PreflightError
from ..graphs import graph_of
from ..testing import ExportedModel
from ..torch_runner import TorchRunner


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


def samples_of(model: nn.Module, meta: dict, pictures: Sequence[Tensor], batch: int | None = None) -> Samples:
    """Pictures as a model's inputs.

    Args:
        model (nn.Module): what is to be exported.
        meta (dict): what :func:`describe_model` gives.
        pictures (Sequence[Tensor]): uint8 `(3, h, w)`, of a data loader.
        batch (int, optional): pictures at once, all of the file's shape, as the runtimes take them. By default one,
            of its own shape: a detector's file pads pictures that stand and pictures that lie to one square.

    Raises:
        PreflightError: there are fewer pictures than a batch.
    """
    if batch is None:
        meta = {**meta, 'shape': [None, 3, None, None]}
    return Samples(pictures, ExportedModel(TorchRunner(graph_of(model), meta)).arrays, batch or 1)
