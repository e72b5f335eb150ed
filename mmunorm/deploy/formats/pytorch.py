"""torch as a runtime of benchmarks alone: its file is a pickle, which may execute code when it is opened."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from ...utils import PreflightError
from ..graph import Exportable
from .base import Batches, Format, Session, Variant, register_format


class TorchSession(Session):

    def __init__(self, graph: nn.Module, meta: dict):
        self.graph, self.meta = graph, meta

    @torch.no_grad()
    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        out = self.graph(*map(torch.from_numpy, arrays))
        return [tensor.numpy() for tensor in (out if isinstance(out, tuple) else (out, ))]


@register_format
class Torch(Format):
    name, suffixes, runtime = 'torch', ('.pth', ), 'torch'
    is_offered = False  # see above
    variants = {'torch': Variant('torch eager'),
                'compiled': Variant('torch compiled', load_options=dict(compiled=True))}

    def check(self, int8: str | None = None, option: str = 'int8') -> None:
        """Accepts any torch version."""

    def export(self, model: Exportable, path: Path, half: bool = False, int8: str | None = None,
               samples: Batches = ()) -> None:
        torch.save((model.graph, model.meta, model.inputs), path)

    def load(self, path: Path, threads: int | None, compiled: bool = False) -> TorchSession:
        if threads:
            torch.set_num_threads(threads)
        from ...checkpoints.reading import reading  # needs mmengine, as benchmarks do
        with reading(trusted=True):
            graph, meta, inputs = torch.load(path, weights_only=False)
        if not compiled:
            return TorchSession(graph, meta)
        graph = torch.compile(graph)
        try:
            with torch.no_grad():
                graph(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = ' '.join(str(error).strip().splitlines()[:2])  # the rest are hints for torch developers
            raise PreflightError(f'torch.compile: {reason}') from error
        return TorchSession(graph, meta)

    def size(self, path: Path, model: Exportable) -> int:
        """Size of the weights in memory in bytes."""
        return sum(tensor.nbytes for tensor in [*model.graph.parameters(), *model.graph.buffers()])
