"""Folds every norm of a model that can be, and says where each went: find, check, verify, apply."""
from __future__ import annotations

from contextlib import nullcontext, suppress

import torch
from torch import nn

from .apply import apply
from .check import check
from .examples import Run, copy_of, runs_of
from .graph.place import Places
from .graph.trace import trace
from .plan import FoldPlan, unwrapped
from .report import Fold, FusionReport, NotFoldedError, by_reason
from .rules import check_names
from .verify import verify

_LARGEST_MODEL = 10**9  # parameters; a larger one is not copied in float64


def fuse_norms(model: nn.Module, strict: bool = False, example=None) -> FusionReport:
    """Folds every offline norm of `model` into its neighbour, in place (Algorithm 1).

    Offline norms are mmunorm's and all others with `affine()`, torch's BatchNorm and frozen ones. A run of the model
    shows what reads each norm. Then a folded copy has to compute what the model computes. What cannot be folded exactly
    is left as it is. Folding a folded model changes nothing. Linear layers in the NTK parametrization become plain
    ones, and the factors of residual schemes go into the layers beside them.

    What is read out of the middle of a folded model, such as a classifier's features before its head, lacks
    the norm that has gone into the next layer.

    Args:
        model (nn.Module): in eval mode; whole, if its last norms are to go into its head or neck.
        strict (bool): make it an error if any norm stays. Defaults to False.
        example: what goes into the model: a tensor, a tuple of arguments, a dict of keyword arguments, a function that
            runs the model it is given and returns what is to be compared, or a list of such. Copies of the model run
            on each, and on a tensor of images `(N, C, H, W)` or tokens `(N, L, C)` also in other sizes if it takes
            these. What is folded is right for the ways that they take through the model: give one for each. Defaults
            to None: whole models of mmdet, mmpretrain, timm and mmunorm know how to run. Norms of others stay.

    Returns:
        FusionReport: each norm, where it went, or why it stays, and the largest difference on the example.

    Raises:
        ValueError: `model` or a part of it is in training mode.
        TypeError: `model` is no module, or `example` is of another kind.
        RuntimeError: the model does not run on `example`, or cannot be copied.
        NameError: a fold rule names a class that does not exist.
        NotFoldedError: `strict` is set and a norm stays; lists all of them. `model` is unchanged.
        NotExactError: the folded copy computes something else on `example`; names the norms. `model` is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f'model: must be a nn.Module, got {type(model).__name__}; eval() of some models returns None')
    for name, module in model.named_modules():
        # Without torch.compile's wrapper: in 2.4 its own flag stays, whatever `eval()` says.
        if module.training and not hasattr(module, '_orig_mod'):
            raise ValueError(f"model: {name or 'it'} is in training mode; call model.eval() first")
    check_names()
    plan = FoldPlan(unwrapped(model))
    runs, dtype = _find(plan, plan.example if example is None else example)
    check(plan)
    kept = tuple(fold for fold in plan.folds if fold.obstacle)
    if strict and kept:
        listed = '\n'.join(f'  {norm} ({kind}): {why}' for norm, kind, why in by_reason(kept))
        raise NotFoldedError(f'strict=True, and {len(kept)} norms cannot be folded:\n{listed}')
    difference = verify(plan, runs, dtype) if runs else None
    apply(plan, plan.model)
    return FusionReport(tuple(fold for fold in plan.folds if not fold.obstacle), kept, difference)


def _find(plan: FoldPlan, example) -> tuple[list[Run], torch.dtype | None]:
    """Step 1: finds where each norm goes; returns the runs that the model takes, and their type, None for its own."""
    runs, kind = [] if example is None else runs_of(example), type(plan.model).__name__
    why = f'no example= says how to run {kind}, and no fold rule does; such as torch.randn(1, 3, 224, 224)'
    size = sum(parameter.numel() for parameter in plan.model.parameters())
    for dtype in (torch.float64, None) if runs and (plan.affines or plan.factors) else ():
        if dtype is not None and size > _LARGEST_MODEL:
            continue
        with suppress(RuntimeError) if dtype is not None else nullcontext():  # not all models run in float64
            traced, taken, error = trace(copy_of(plan.model, dtype), plan, runs, dtype)
            if taken:
                places = Places(plan, traced)
                plan.folds = [places.fold(name) for name in plan.norms]
                return taken, dtype
            why = f'{kind} does not run on the example of its fold rule ({error}); give fuse_norms another example='
    plan.factors.clear()  # nothing would show that they are right
    plan.folds = [Fold(name, type(norm).__name__, obstacle=plan.obstacles[name] or why)
                  for name, norm in plan.norms.items()]
    return [], None
