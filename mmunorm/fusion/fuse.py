"""Folds the norms of a model in four steps: find, check, verify, apply."""
from __future__ import annotations

from contextlib import nullcontext, suppress

import torch
from torch import nn

from ..utils import check_module
from .apply import apply
from .check import check
from .examples import Run, copy_of, runs_of
from .find import find
from .plan import FoldPlan, unwrapped
from .report import Fold, FusionReport, NotFoldedError, by_reason
from .rules import check_names
from .verify import verify

_LARGEST_MODEL = 10**9  # parameters; a larger one is not copied in float64


def fuse_norms(model: nn.Module, strict: bool = False, example=None) -> FusionReport:
    """Folds every offline norm of `model` into its neighbour, in place (Algorithm 1).

    Offline norms are those of mmunorm, every other norm with `affine()`, and torch's BatchNorm, frozen or not. The
    model runs on an example to find the consumers of each norm. Before the model is changed, a folded copy is verified
    to compute the same outputs. Norms that cannot be folded exactly are kept. Folding a folded model changes
    nothing. Linear layers in the NTK parametrization become plain linear layers, and the factors of residual schemes
    are folded into the adjacent layers.

    Intermediate features of a folded model, such as a classifier's features before its head, are not normalized if
    their norm was folded into the next layer.

    Args:
        model (nn.Module): a model in eval mode. Pass the whole model to fold its last norms into its head or neck.
        strict (bool): raise an error if any norm cannot be folded. Defaults to False.
        example: an input of the model: a tensor, a tuple of arguments, a dict of keyword arguments, a function that
            takes the model, runs it and returns the outputs to compare, or a list of these. Copies of the model run on
            each of them; tensors of images `(N, C, H, W)` or tokens `(N, L, C)` are also tried in other sizes. Folding
            is verified only for the code paths that the examples take: pass one example for each. Defaults to None,
            which works for whole models of mmdet, mmpretrain, timm and mmunorm. Norms of other models are kept.

    Returns:
        FusionReport: where each norm was folded or why it was kept, and the largest difference on the example.

    Raises:
        ValueError: `model` or a part of it is in training mode.
        TypeError: `model` is not a module, or `example` is of another type.
        RuntimeError: the model does not run on `example`, or cannot be copied.
        NameError: a fold rule names a class that does not exist.
        NotFoldedError: `strict` is set and norms cannot be folded; lists them. `model` is unchanged.
        NotExactError: the outputs of two copies differ on `example` before a norm is folded. `model` is unchanged.
    """
    check_module(model)
    for name, module in model.named_modules():
        # Not torch.compile's wrapper: in torch 2.4, `eval()` does not change its flag.
        if module.training and not hasattr(module, '_orig_mod'):
            raise ValueError(f"model: {name or 'it'} is in training mode; call model.eval() first")
    check_names()
    plan = FoldPlan(unwrapped(model))
    runs, dtype = _find(plan, plan.example if example is None else example)
    check(plan)
    difference = verify(plan, runs, dtype) if runs else None
    kept = tuple(fold for fold in plan.folds if fold.obstacle)
    if strict and kept:
        listed = '\n'.join(f'  {norm} ({kind}): {why}' for norm, kind, why in by_reason(kept))
        raise NotFoldedError(f'strict=True, and {len(kept)} norms cannot be folded:\n{listed}')
    apply(plan, plan.model)
    return FusionReport(tuple(fold for fold in plan.folds if not fold.obstacle), kept, difference)


def _find(plan: FoldPlan, example) -> tuple[list[Run], torch.dtype | None]:
    """Step 1: finds the target of each norm. Returns the runs that succeed, and their dtype or None."""
    runs, kind = [] if example is None else runs_of(example), type(plan.model).__name__
    why = f'no fold rule can run {kind}: pass example=, such as torch.randn(1, 3, 224, 224)'
    size = sum(parameter.numel() for parameter in plan.model.parameters())
    for dtype in (torch.float64, None) if runs and (plan.affines or plan.factors) else ():
        if dtype is not None and size > _LARGEST_MODEL:
            continue
        with suppress(RuntimeError) if dtype is not None else nullcontext():  # not all models run in float64
            folds, taken, error = find(copy_of(plan.model, dtype), plan, runs, dtype)
            if taken:
                plan.folds = folds
                return taken, dtype
            why = f'{kind} does not run on the example of its fold rule ({error}); pass another example= to fuse_norms'
    plan.factors.clear()  # they could not be verified
    plan.folds = [Fold(name, type(norm).__name__, obstacle=plan.obstacles[name] or why)
                  for name, norm in plan.norms.items()]
    return [], None
