"""One graph of a model, which each format writes as a file."""
from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn

from ..utils import PreflightError


@dataclass(frozen=True, eq=False)
class Exportable:
    """A model as one graph, which each format writes in its own way."""
    graph: nn.Module  # with `inputs` and `outputs`, their names; its window attention is one that exporters take
    stock: nn.Module  # the same graph with the model's own layers
    meta: dict  # what the file will say about itself
    inputs: tuple[torch.Tensor, ...]  # a sample, by :func:`sample_inputs`
    open_shapes: tuple[dict, ...] | None  # for each input torch's `Dim` of the dimensions that are not fixed
    expected: dict[str, np.ndarray]  # what torch makes of the sample, by name of output
    norms: int  # their number in the model

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The graph as `torch.export` sees it; a PreflightError if torch cannot export it."""
        with exporting():
            return torch.export.export(self.graph, self.inputs, dynamic_shapes=self.open_shapes, strict=False,
                                       prefer_deferred_runtime_asserts_over_guards=True)


@contextmanager
def exporting() -> Iterator[None]:
    """Within it, an error of torch's exporters is a PreflightError."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of torch about its own functions
        try:
            yield
        except (RuntimeError, ValueError) as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise PreflightError(f'torch cannot export this model: {reason}') from error
