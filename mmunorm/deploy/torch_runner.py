"""A model of torch behind the interface of an exported file."""
from __future__ import annotations

import numpy as np
import torch
from torch import nn

from .runner import Runner


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
