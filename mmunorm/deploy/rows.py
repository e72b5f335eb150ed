"""What a benchmark of formats compares: a model in torch and in each runtime, all behind the same :class:`Runner`."""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from ..benchmark.measure import size_in_memory, weights_of
from ..errors import PreflightError
from ..fusion import fuse_norms
from .export import Traced, trace
from .formats import find_format
from .graphs import graph_of
from .int8 import NormForm, Samples, apply_forms, choose_forms, samples_of
from .runner import Runner
from .saving import file_size, save
from .torch_runner import TorchRunner
from .windows import with_static_windows


class Subject:
    """One model of a benchmark, in all its forms.

    Args:
        name (str): of its rows.
        model (nn.Module): with its norms, in eval mode, on the CPU.
        meta (dict): what :func:`describe_model` gives.
        batch (int): pictures at once.
        folder (Path): for its files.
        threads (int): of the CPU.
        pictures (Sequence[Tensor]): uint8 `(3, h, w)` training pictures, for INT8. Defaults to none.

    Attributes:
        model (nn.Module): folded.
        traced (Traced): the folded model.
    """

    def __init__(self, name: str, model: nn.Module, meta: dict, batch: int, folder: Path, threads: int,
                 pictures: Sequence[torch.Tensor] = ()):
        self.name, self.folder, self.threads = name, folder, threads
        self._model, self._meta, self._batch, self._pictures = model, meta, batch, pictures
        self.model = copy.deepcopy(model)
        fuse_norms(self.model)
        self.traced = trace(self.model, meta, batch)
        self._files = {}

    def file(self, name: str, form: str = 'float') -> Path:
        """The model in the format of this name; written when it is asked for the first time.

        Args:
            name (str): of the format.
            form (str): 'float'; 'int8', with the better form of each norm; or 'int8-folded'. Defaults to 'float'.

        Raises:
            PreflightError: a form of INT8 is asked for, and a package for it is missing, or there are no pictures.
        """
        if (name, form) not in self._files:
            chosen = find_format(name, ('int8', ) if form != 'float' else ())
            traced = self._traced_with_chosen_norms if form == 'int8' else self.traced
            self._files[name, form] = save(traced, chosen, self.folder / f'{form}{chosen.suffix}',
                                           samples=None if form == 'float' else self.samples)
        return self._files[name, form].path

    @cached_property
    def samples(self) -> Samples:
        """The pictures as batches."""
        return samples_of(self._model, self._meta, self._pictures, self._batch)

    @cached_property
    def forms(self) -> list[NormForm]:
        """What :func:`choose_forms` measures."""
        return choose_forms(self._model, samples_of(self._model, self._meta, self._pictures), progress=True)

    @cached_property
    def with_chosen_norms(self) -> nn.Module:
        """The model with the better form of each norm."""
        model = copy.deepcopy(self._model)
        apply_forms(model, self.forms)
        return model

    @cached_property
    def _traced_with_chosen_norms(self) -> Traced:
        return trace(self.with_chosen_norms, self._meta, self._batch)

    def eager(self) -> Runner:
        """In torch, with the model's own layers."""
        return TorchRunner(graph_of(self.model), self.traced.meta)

    def compiled(self) -> Runner:
        """In torch, compiled.

        Raises:
            PreflightError: torch cannot compile it, for example because there is no compiler for C++.
        """
        graph = torch.compile(with_static_windows(graph_of(self.model)).eval())
        try:
            with torch.no_grad():
                graph(*self.traced.inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = ' '.join(str(error).strip().splitlines()[:2])  # behind them come hints for torch's developers
            raise PreflightError(f'torch.compile: {reason}') from error
        return TorchRunner(graph, self.traced.meta)

    def weights(self) -> int:
        """Bytes of its parameters and buffers in torch."""
        return size_in_memory(weights_of(self.model))


@dataclass(frozen=True)
class Row:
    """One form of a model.

    Attributes:
        label: for the reader.
        make: gives its runner and the bytes that it takes on the disk, or in memory if it is no file.
    """
    label: str
    make: Callable[[Subject], tuple[Runner, int]]


def _of_file(name: str, form: str = 'float', precision: str = 'f32') -> Callable[[Subject], tuple[Runner, int]]:
    def make(subject: Subject) -> tuple[Runner, int]:
        path = subject.file(name, form)
        return Runner(path, subject.threads, precision), file_size(path)
    return make


# By what `--formats` of tools/deploy/benchmark.py takes.
ROWS = {
    'torch': Row('torch eager', lambda subject: (subject.eager(), subject.weights())),
    'compiled': Row('torch compiled', lambda subject: (subject.compiled(), subject.weights())),
    'onnx': Row('ONNX Runtime', _of_file('onnx')),
    'openvino': Row('OpenVINO', _of_file('openvino')),
    'openvino-bf16': Row('OpenVINO bfloat16', _of_file('openvino', precision='bf16')),
    'onnx-int8': Row('ONNX Runtime INT8', _of_file('onnx', 'int8')),
    'openvino-int8': Row('OpenVINO INT8', _of_file('openvino', 'int8')),
    'openvino-int8-folded': Row('OpenVINO INT8, all norms folded', _of_file('openvino', 'int8-folded')),
}
