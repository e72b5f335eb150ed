"""The one verb: fold every norm of a model away that can be, and say where each went (Algorithm 1).

A :class:`FoldPlan` goes through four steps, in a file each: `find` says where each norm goes, `check` what forbids it,
`verify` runs a folded copy, and `apply` folds the model.
"""
from __future__ import annotations

from torch import nn

from .apply import apply
from .check import check
from .examples import copy_of, runs_of, with_plain_weights
from .find import find
from .graph.place import Places
from .graph.trace import trace
from .plan import FoldPlan
from .report import FusionReport, NotFoldedError
from .rules import check_names
from .verify import verify


def fuse_norms(model: nn.Module, strict: bool = False, example=None) -> FusionReport:
    """Folds every offline norm of `model` into its neighbour, in place (Algorithm 1).

    The folded model computes the same function without any normalization. Offline norms are mmunorm's and all others
    with `affine()`, torch's BatchNorm and frozen ones. With an `example`, what ran decides where they go, and a folded
    copy has to compute on it what the model computes. Without one, the rules of :func:`mmunorm.fusion.fold_rule` say
    it, for models whose classes they know. What cannot be folded exactly is left as it is. Folding a folded model
    changes nothing. Linear layers in the NTK parametrization become plain ones, and the factors of residual schemes
    go into the layers beside them.

    What is read out of the middle of a folded model, such as a classifier's features before its head, lacks
    the norm that has gone into the next layer.

    Args:
        model (nn.Module): in eval mode; whole, if its last norms are to go into its head or neck.
        strict (bool): make it an error if any norm stays. Defaults to False.
        example: what goes into the model: a tensor, a tuple of arguments, a dict of keyword arguments, a function that
            runs the model it is given and returns what is to be compared, or a list of such. Copies of the model run
            on each, and on a tensor of images `(N, C, H, W)` or tokens `(N, L, C)` also in other sizes if it takes
            these. What is folded is right for the ways that they take through the model: give one for each. Defaults
            to None: rules alone, and nothing is compared.

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
    runs = [] if example is None else runs_of(example)
    plan = FoldPlan(model)
    if not (plan.affines or plan.factors):
        runs = []
    places = Places(plan, trace(with_plain_weights(copy_of(model)), plan, runs)) if runs else None
    plan.folds = find(plan, places)
    check(plan)
    kept = tuple(fold for fold in plan.folds if fold.obstacle)
    if strict and kept:
        listed = '\n'.join(f'  {fold.norm} ({fold.kind}): {fold.where}' for fold in kept)
        raise NotFoldedError(f'strict=True, and {len(kept)} norms cannot be folded:\n{listed}')
    difference = verify(plan, runs) if runs else None
    apply(plan, model)
    return FusionReport(tuple(fold for fold in plan.folds if not fold.obstacle), kept, difference)
