"""The one verb: fold every norm of a model away that can be, and say where each went (Algorithm 1).

Three steps, in a file each: `find` says where each norm goes, `check` what forbids it, and `rewrite` does it.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ..compat import forget_compiled_code
from ..init import undo_ntk
from ..residuals import Residual
from .check import check
from .find import find
from .padding import Fill
from .report import FusionReport, NotFoldedError, streams_of
from .rewrite import add_to_state, affine_of, leave, num_channels, rewrite
from .rules import check_names
from .scales import fold_scales
from .streams import fold_stream, leave_residual, stations_of


def fuse_norms(model: nn.Module, strict: bool = False, example=None) -> FusionReport:
    """Folds every offline norm of `model` into its neighbour, in place (Algorithm 1).

    The folded model computes the same function without any normalization, for every input size. Offline
    norms are mmunorm's and all others with `affine()`, and torch's BatchNorm. Where they go is told by the
    rules of :func:`mmunorm.fusion.fold_rule`, and where no rule knows a block by the model's graph on `example`.
    What cannot be folded exactly is left as it is. Folding a folded model changes nothing. Linear layers in the NTK
    parametrization become plain ones, and the factors of residual schemes go into the layers beside them.

    What is read out of the middle of a folded model, such as a classifier's features before its head, lacks
    the norm that has gone into the next layer.

    Args:
        model (nn.Module): in eval mode; whole, if its last norms are to go into its head or neck.
        strict (bool): make it an error if any norm stays. Defaults to False.
        example: what goes into the model: a tensor, a tuple of arguments, a dict of keyword arguments, or a list of
            such. A copy of the model runs on each, and on a tensor of pictures `(N, C, H, W)` or tokens `(N, L, C)`
            also in other sizes if it takes these. What is folded by them alone is right for the way that they take
            through the model: give one for each. Defaults to None: rules alone.

    Returns:
        FusionReport: each norm, where it went, or why it stays.

    Raises:
        ValueError: `model` or a part of it is in training mode.
        TypeError: `example` is of another kind.
        RuntimeError: the model does not run on `example`.
        NameError: a fold rule names a class that does not exist.
        NotFoldedError: `strict` is set and a norm stays; lists all of them. `model` is unchanged.
    """
    for name, module in model.named_modules():
        # Without torch.compile's wrapper: in 2.4 its own flag stays, whatever `eval()` says.
        if module.training and '_orig_mod' not in module._modules:
            raise ValueError(f"model: {name or 'it'} is in training mode; call model.eval() first")
    check_names()
    folds = find(model, example)
    check(model, folds)
    report = FusionReport(tuple(fold for fold in folds if not fold.obstacle),
                          tuple(fold for fold in folds if fold.obstacle))
    if strict and report.kept:
        listed = '\n'.join(f'  {fold.norm} ({fold.kind}): {fold.where}' for fold in report.kept)
        raise NotFoldedError(f'strict=True, and {len(report.kept)} norms cannot be folded:\n{listed}')
    undo_ntk(model)
    affines = {fold.norm: affine_of(model.get_submodule(fold.norm)) for fold in report.folded}
    for stream in streams_of(report.folded):
        affines.update(fold_stream(model, stream))
    for fold in report.folded:
        rewrite(model, fold, *affines[fold.norm])
    fold_scales(model)
    forget_compiled_code()
    return report


def fold_structure(model: nn.Module, names: Iterable[str], made: Mapping[str, Sequence[str]] | None = None) -> None:
    """Gives `model` the structure of a folded one, for folded weights to be loaded into, in place.

    Args:
        model (nn.Module): of any weights, statistics and norms: they are lost.
        names: full names of the norms that are folded.
        made: of those that were folded by the model's graph, the tensors that came into its state by that.

    Raises:
        ValueError: `model` has no such norm, or no fold rule covers its place.
    """
    folds = {fold.norm: fold for fold in find(model)}
    modules = dict(model.named_modules())
    undo_ntk(model)
    for name in names:
        fold = folds.get(name)
        if isinstance(modules.get(name), Residual):
            leave_residual(model, name)
        elif fold is not None and made and name in made:
            for tensor in made[name]:
                add_to_state(model, tensor)
            leave(model, name, tuple(made[name]))
        elif fold is None or not fold.sites and fold.stream is None:
            raise ValueError(f'{type(model).__name__} has no norm {name} to fold, which the checkpoint has '
                             'folded: it is of another architecture')
        else:
            channels = num_channels(modules[fold.sites[0].layer], fold.sites[0].after) if fold.sites else 0
            ones = torch.ones(channels, dtype=torch.float64)
            rewrite(model, fold, ones, torch.zeros_like(ones))
    for stream in streams_of(folds[name] for name in names if name in folds):
        for name, pad in stream.pads:
            last = stations_of(modules[stream.layers], stream.layers)[0].last
            channels = num_channels(modules[last], after=True)
            pad(model.get_submodule(name), Fill(torch.zeros(channels, dtype=torch.float64)))
