"""The one verb: fold every norm of a model away that can be, and say where each went (Algorithm 1).

Three steps, in a file each: `find` says where each norm goes, `check` what forbids it, and `rewrite` does it.
"""
from __future__ import annotations

import torch
from torch import nn

from ..compat import forget_compiled_code
from ..init import undo_ntk
from ..residuals import ResidualLayer
from ..residuals.sublayer import describe
from .check import Owners, call_obstacle, check, layer_obstacle
from .find import find
from .report import FusionReport, NotFoldedError, Site, streams_of
from .rewrite import absorb, affine_of, rewrite
from .rules import check_names
from .streams import factor, fold_stream, leave_residual


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
    carried = {}
    for stream in streams_of(report.folded):
        carried.update(fold_stream(model, stream))
    for fold in report.folded:
        rewrite(model, fold, *carried.get(fold.norm) or affine_of(model.get_submodule(fold.norm)))
    _fold_branch_scales(model)
    forget_compiled_code()
    return report


def _fold_branch_scales(model: nn.Module) -> None:
    """Takes b of each connection, such as LayerScale's, into the last layer of F, wherever the sum reads that layer.

    Where a norm stands after the sum it has stayed, and so does b.
    """
    names, owners = {id(module): name for name, module in model.named_modules()}, Owners(model)
    # All of them first: ReZero's connections share theirs.
    found = [(getattr(layer, residual), describe(getattr(layer, part)), getattr(layer, norm),
              getattr(layer, residual).scales()[1])
             for layer in model.modules() if isinstance(layer, ResidualLayer)
             for residual, part, norm in layer.sublayers()]
    for residual, sublayer, norm, b in found:
        last, name = sublayer.last, names[id(sublayer.last)]
        between = [residual.norm, *([norm] if residual.norm_at == 'mid' else [])]
        is_plain = sublayer.is_plain_behind_last and all(isinstance(module, nn.Identity) for module in between)
        if b is None or residual.norm_at == 'post' or not is_plain or call_obstacle(residual) or layer_obstacle(
                last, last.out_features, after=True) or owners.others(name, last):
            continue
        like = torch.ones(last.out_features, dtype=torch.float64, device=last.weight.device)
        absorb(model, Site(name, after=True), factor(b, like), torch.zeros_like(like))
        leave_residual(model, names[id(residual)])
