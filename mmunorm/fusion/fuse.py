"""The one verb: fold every norm of a model away that can be, and say where each went (Algorithm 1).

A :class:`FoldPlan` goes through four steps: `graph` finds where each norm goes by a run of the model, `check` what
forbids it, `verify` runs a folded copy, and `apply` folds the model.
"""
from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from .apply import apply
from .check import check
from .examples import Run, copy_of, runs_of
from .graph.place import Places
from .graph.trace import trace
from .graph.traced import TracedModel
from .plan import FoldPlan, unwrapped
from .report import Fold, FusionReport, NotFoldedError, by_reason
from .rules import check_names
from .verify import verify

_LARGEST_MODEL = 10**9  # parameters; a larger one is not copied in float64


def fuse_norms(model: nn.Module, strict: bool = False, example=None) -> FusionReport:
    """Folds every offline norm of `model` into its neighbour, in place (Algorithm 1).

    The folded model computes the same function without any normalization. Offline norms are mmunorm's and all others
    with `affine()`, torch's BatchNorm and frozen ones. A run of the model shows what reads each norm. Then a folded
    copy has to compute what the model computes. What cannot be folded exactly is left as it is. Folding a folded
    model changes nothing. Linear layers in the NTK parametrization become plain ones, and the factors of residual
    schemes go into the layers beside them.

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
        TypeError: `example` is of another kind.
        RuntimeError: the model does not run on `example`, or cannot be copied.
        NameError: a fold rule names a class that does not exist.
        NotFoldedError: `strict` is set and a norm stays; lists all of them. `model` is unchanged.
        NotExactError: the folded copy computes something else on `example`; names the norms. `model` is unchanged.
    """
    for name, module in model.named_modules():
        # Without torch.compile's wrapper: in 2.4 its own flag stays, whatever `eval()` says.
        if module.training and '_orig_mod' not in module._modules:
            raise ValueError(f"model: {name or 'it'} is in training mode; call model.eval() first")
    check_names()
    plan = FoldPlan(unwrapped(model))
    example = plan.example if example is None else example
    runs = [] if example is None else runs_of(example)
    if runs and (plan.affines or plan.factors):
        traced, runs, dtype = _traced(plan, runs)
        places = Places(plan, traced)
        plan.folds = [places.fold(name) for name in plan.norms]
    else:
        why = ('' if runs else f'no example= says how to run {type(plan.model).__name__}, and no fold rule does; '
               'such as fuse_norms(model, example=torch.randn(1, 3, 224, 224))')
        plan.folds = [Fold(name, type(norm).__name__, obstacle=plan.obstacles[name] or why)
                      for name, norm in plan.norms.items()]
        runs = []
    check(plan)
    kept = tuple(fold for fold in plan.folds if fold.obstacle)
    if strict and kept:
        listed = '\n'.join(f'  {norm} ({kind}): {why}' for norm, kind, why in by_reason(kept))
        raise NotFoldedError(f'strict=True, and {len(kept)} norms cannot be folded:\n{listed}')
    difference = verify(plan, runs, dtype) if runs else None
    apply(plan, plan.model)
    return FusionReport(tuple(fold for fold in plan.folds if not fold.obstacle), kept, difference)


def _traced(plan: FoldPlan, runs: list[Run]) -> tuple[TracedModel, list[Run], torch.dtype | None]:
    """What a run of a copy shows, the runs that the model takes, and their type: float64, or None for the model's."""
    if sum(parameter.numel() for parameter in plan.model.parameters()) <= _LARGEST_MODEL:
        with suppress(RuntimeError):  # some of its tensors cannot be float64
            return *trace(copy_of(plan.model, torch.float64), plan, runs, torch.float64), torch.float64
    return *trace(copy_of(plan.model), plan, runs), None
