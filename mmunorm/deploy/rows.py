"""What a benchmark of formats compares: a model in torch and in each runtime, all as a :class:`Runner`."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

from ..benchmark.measure import size_in_memory, weights_of
from ..fusion import fuse_norms
from .export import trace
from .formats import find_format
from .graphs import graph_of
from .int8 import samples_of
from .runner import Runner
from .saving import file_size, save
from .torch_runner import TorchRunner, open_torch


class Subject:
    """One model of a benchmark, in all its forms.

    Args:
        name (str): of its rows.
        model (nn.Module): in eval mode, on the CPU; its norms are folded, in place.
        meta (dict): what :func:`describe_model` gives.
        batch (int): pictures at once.
        folder (Path): for its files.
        threads (int): of the CPU.
        pictures (Sequence[Tensor]): uint8 `(3, h, w)` training pictures, for INT8. Defaults to none.

    Attributes:
        traced (Traced): the folded model.
    """

    def __init__(self, name: str, model: nn.Module, meta: dict, batch: int, folder: Path, threads: int,
                 pictures: Sequence[torch.Tensor] = ()):
        self.name, self.model, self.folder, self.threads = name, model, folder, threads
        self._batch, self._pictures = batch, pictures
        fuse_norms(model)
        self.traced = trace(model, meta, batch)
        self._files = {}

    def file(self, name: str, int8: bool = False) -> Path:
        """The model in the format of this name; written when it is asked for the first time.

        Args:
            name (str): of the format.
            int8 (bool): Defaults to False.

        Raises:
            PreflightError: a package is missing, or INT8 is asked for and there are no pictures.
        """
        if (name, int8) not in self._files:
            chosen = find_format(name, int8)
            samples = samples_of(self.model, self.traced.meta, self._pictures, self._batch) if int8 else None
            path = self.folder / f'{"int8" if int8 else "float"}{chosen.suffix}'
            self._files[name, int8] = save(self.traced, chosen, path, samples=samples).path
        return self._files[name, int8]

    @cached_property
    def pickled(self) -> Path:
        """The model with its own layers, for :func:`open_torch`."""
        path = self.folder / 'torch.pth'
        torch.save((graph_of(self.model), self.traced.meta, self.traced.inputs), path)
        return path

    def eager(self) -> Runner:
        """In torch, with the model's own layers."""
        return TorchRunner(graph_of(self.model), self.traced.meta)

    def weights(self) -> int:
        """Bytes of its parameters and buffers in torch."""
        return size_in_memory(weights_of(self.model))


@dataclass(frozen=True)
class Row:
    """One form of a model.

    Attributes:
        label: for the reader.
        make: gives what opens its runner, and the bytes that it takes on the disk, or in memory if it is no file.
    """
    label: str
    make: Callable[[Subject], tuple[Callable[[], Runner], int]]


def _of_file(name: str, int8: bool = False, precision: str = 'f32'):
    def make(subject: Subject) -> tuple[Callable[[], Runner], int]:
        path = subject.file(name, int8)
        return partial(Runner, path, subject.threads, precision), file_size(path)
    return make


def _of_torch(compiled: bool):
    def make(subject: Subject) -> tuple[Callable[[], Runner], int]:
        return partial(open_torch, subject.pickled, subject.threads, compiled), subject.weights()
    return make


# By what `--formats` of tools/deploy/benchmark.py takes.
INT8 = '-int8'
ROWS = {
    'torch': Row('torch eager', _of_torch(False)),
    'compiled': Row('torch compiled', _of_torch(True)),
    'onnx': Row('ONNX Runtime', _of_file('onnx')),
    'openvino': Row('OpenVINO', _of_file('openvino')),
    'openvino-bf16': Row('OpenVINO bfloat16', _of_file('openvino', precision='bf16')),
    'onnx-int8': Row('ONNX Runtime INT8', _of_file('onnx', True)),
    'openvino-int8': Row('OpenVINO INT8', _of_file('openvino', True)),
}
