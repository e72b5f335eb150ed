"""A model as one graph, the input of all formats."""
from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from ..fusion import FoldedLayerNorm, FoldedRMSNorm
from ..norms.layers import norm_layers
from ..utils import PreflightError, error_text


@dataclass(frozen=True, eq=False)
class Exportable:
    """A model as one graph, to be written by a format."""
    graph: nn.Module  # has the names `inputs` and `outputs`, and an exportable window attention
    stock: nn.Module  # the same graph with the model's own layers
    meta: dict  # metadata of the file
    inputs: tuple[torch.Tensor, ...]  # a sample, see :func:`sample_inputs`
    open_shapes: tuple[dict, ...] | None  # torch's `Dim` of the dynamic dimensions of each input
    norms: int  # number of norms in the model
    plain: int = 0  # number of LayerNorms and RMSNorms that are left without weights

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The result of `torch.export`. Raises a PreflightError if torch cannot export the graph."""
        with exporting():
            return torch.export.export(self.graph, self.inputs, dynamic_shapes=self.open_shapes, strict=False,
                                       prefer_deferred_runtime_asserts_over_guards=True)


def norms_left(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the norms in a model, and of the LayerNorms and RMSNorms that folding has left without weights."""
    return [name for name, _ in norm_layers(model)], [
        name for name, module in model.named_modules() if isinstance(module, (FoldedLayerNorm, FoldedRMSNorm))]


@contextmanager
def exporting() -> Iterator[None]:
    """A context that turns errors of torch's exporters into a PreflightError."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # torch warns about its own functions
        try:
            yield
        except (RuntimeError, ValueError) as error:
            cause = error.__cause__ or error
            reason = (str(cause).strip() or error_text(cause)).splitlines()[0]
            raise PreflightError(f'torch cannot export this model: {reason}') from error
