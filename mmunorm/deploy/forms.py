"""Folds the norms of a model that becomes a file, in the form that suits the file."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..fusion import FusionReport, allow_partial_calls, fuse_norms, streams_of
from ..fusion.layers import Folded
from ..utils import error_text, warn
from .graph import norms_left

MOST = 32  # images, with which the mean of keys and values is measured
UNROTATED = ('the model is folded without rotate="hadamard", which INT8 needs to keep what LayerNorm keeps: give the '
             'model as it was before fuse_norms')


def fold_for(model: nn.Module, int8: str | None, example: Tensor | None = None,
             calibration: Tensor | Callable | None = None, layer_norms: str = 'exact') -> FusionReport:
    """Folds the norms of a model in eval mode in place, in the form for a file, by :func:`mmunorm.fuse_norms`.

    In INT8, residual streams and heads are rotated, and keys and values lose their mean over `calibration`: images
    `(N, C, H, W)`, or a function that runs a model on some. `example` is images of the file's size, by default those of
    a known model.
    """
    options = {}
    if int8 is not None and layer_norms == 'exact':
        if isinstance(calibration, Tensor):
            calibration = calibration[torch.linspace(0, len(calibration) - 1, min(MOST, len(calibration))).long()]
            calibration = calibration.split(len(example))
        options = dict(rotate='hadamard', calibration=calibration)
    # As a tuple it is not tried in other sizes, which the file does not take.
    example = None if example is None else (example.clone(), )
    report = fuse_norms(model, example=example, layer_norms=layer_norms, **options)
    allow_partial_calls(model)
    return report


def folded_copy(model: nn.Module, int8: str | None, example: Tensor, calibration: Tensor | None) -> list[str]:
    """Folds the copy of a model that :func:`mmunorm.export` writes; returns lines for the report.

    A model that is folded already stays as it is, with a warning if its form is not that of the file.
    """
    if any(isinstance(module, Folded) for module in model.modules()):
        if int8 is None or not norms_left(model)[1] or streams_of(model):
            return []
        warn(UNROTATED)
        return [f'warning: {UNROTATED}']
    try:
        report = fold_for(model, int8, example, calibration)
    except (RuntimeError, ValueError) as error:  # the model is unchanged
        warn(line := f'the norms are not folded: {error_text(error)}')
        return [f'warning: {line}']
    return [f'folded: {report.summary}'] if report.folded or report.reduced or report.kept else []


def runs_on(graph_of: Callable[[nn.Module], nn.Module], samples: Sequence[tuple[np.ndarray, ...]]) -> Callable:
    """A function that runs a model, by its graph, on some of the inputs of a file."""

    def run(model: nn.Module) -> None:
        graph = graph_of(model).eval()
        for index in np.linspace(0, len(samples) - 1, min(MOST, len(samples))).astype(int):
            graph(*map(torch.from_numpy, samples[index]))

    return run
