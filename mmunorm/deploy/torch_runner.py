"""A model of torch behind the interface of an exported file."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..utils import PreflightError
from .runner import Runner
from .windows import with_static_windows


class TorchRunner(Runner):
    """A model of torch as the runner of an exported file.

    Args:
        graph (nn.Module): what :func:`graph_of` gives.
        meta (dict): `Traced.meta` of the same model.
    """

    def __init__(self, graph: nn.Module, meta: dict):
        self._session = _Torch(graph)
        self._read(meta)


class _Torch:

    def __init__(self, graph: nn.Module):
        self.graph = graph

    @torch.no_grad()
    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        out = self.graph(*map(torch.from_numpy, arrays))
        return [each.numpy() for each in (out if isinstance(out, tuple) else (out, ))]


def open_torch(path: Path, threads: int, compiled: bool = False) -> TorchRunner:
    """The graph and the `meta` that :class:`Subject` has pickled, ready to run.

    Raises:
        PreflightError: torch cannot compile it, for example because there is no compiler for C++.
    """
    torch.set_num_threads(threads)
    graph, meta, inputs = torch.load(path, weights_only=False)
    if compiled:
        graph = torch.compile(with_static_windows(graph).eval())
        try:
            with torch.no_grad():
                graph(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = ' '.join(str(error).strip().splitlines()[:2])  # after them come hints for torch's developers
            raise PreflightError(f'torch.compile: {reason}') from error
    return TorchRunner(graph, meta)
