"""Folds the norms of a model in four steps: find, check, verify, apply."""
from __future__ import annotations

from contextlib import nullcontext, suppress

import torch
from torch import nn

from ..modules import uncompiled, unwrapped
from ..norms.base import check_choice
from ..utils import check_module, plural
from .affine import statistic_of
from .apply import apply
from .basis import ROTATIONS, change_of, obstacle_of
from .check import check
from .examples import Run, copy_of, runs_of
from .find import find
from .partial_calls import refuse_hidden_states
from .plan import FoldPlan
from .report import SCALE, Fold, FusionReport, NotFoldedError, by_reason
from .residual import ResidualStream, find_streams
from .rules import check_names
from .verify import changes_hidden_states, verify

_LARGEST_MODEL = 10**9  # parameters; a larger one is not copied in float64


def fuse_norms(model: nn.Module, strict: bool = False, example=None, layer_norms: str = 'exact',
               rotate: str | None = None) -> FusionReport:
    """Folds the norms of `model` into the adjacent layers, in place: offline norms whole, LayerNorms except a scale.

    Offline norms are those of mmunorm, every other norm with `affine()`, and torch's BatchNorm, frozen or not. They are
    folded whole (Algorithm 1). Of a LayerNorm, gamma and beta fold into the layers that consume it, and the mean into
    those that write the residual stream before it. A scale of each token is left, :class:`mmunorm.fusion.TokenScale`,
    as of an RMSNorm, which subtracts no mean. Nothing is trained: the function of the model stays the same.

    The model is run on an example to find the consumers of each norm, and what writes each residual stream. Before the
    model is changed, a folded copy is verified to compute the same outputs. Norms that cannot be folded exactly are
    kept. Folding a folded model changes nothing. Weights that are parametrized by a factor become plain weights. A
    LayerScale before a stream that changes is folded into the layer before it.

    Parts of a folded model return other features than before: a classifier's features before its head lack a norm that
    was folded into the head, and tokens of a residual stream lack their mean, or are in another basis. So calling such
    a part alone is an error, unless an example does: see `mmunorm.fusion.partial_calls`. `report.streams` has the way
    back.

    Args:
        model (nn.Module): a model in eval mode. Pass the whole model to fold its last norms into its head or neck.
        strict (bool): raise an error if any norm cannot be folded whole. Defaults to False.
        example: an input of the model: a tensor, a tuple of arguments, a dict of keyword arguments, a function that
            takes the model, runs it and returns the outputs to compare, or a list of these. Copies of the model run on
            each of them; tensors of images `(N, C, H, W)` or tokens `(N, L, C)` are also tried in other sizes. Folding
            is verified only for the code paths that the examples take: pass one example for each. Defaults to None,
            which works for whole models of mmdet, mmpretrain, timm and mmunorm. Norms of other models are kept.
        layer_norms (str): how far LayerNorms and RMSNorms are folded: 'exact' for all that is exact, 'affine' for gamma
            and beta alone, which leaves every residual stream as it is, 'keep' for nothing. Defaults to 'exact'.
        rotate (str, optional): the basis of the residual streams: 'hadamard' or 'random' rotate them, which spreads
            large channels over all and so helps INT8. Also rotates streams whose norms are all offline. Defaults to
            None: channels stay, unless several tokens share a mean, as in Swin; then a reflection makes the mean of a
            token its first channel.

    Returns:
        FusionReport: where each norm was folded or why it was kept, and the largest difference on the example.

    Raises:
        ValueError: `model` or a part of it is in training mode, or `layer_norms` or `rotate` is none of the above.
        TypeError: `model` is not a module, or `example` is of another type.
        RuntimeError: the model does not run on `example`, or cannot be copied.
        NameError: a fold rule names a class that does not exist.
        NotFoldedError: `strict` is set and norms cannot be folded; lists them. `model` is unchanged.
        NotExactError: the outputs of two copies differ on `example` before a norm is folded. `model` is unchanged.
    """
    check_module(model)
    check_choice('layer_norms', layer_norms, ('exact', 'affine', 'keep'))
    check_choice('rotate', rotate, (None, *ROTATIONS))
    if rotate and layer_norms != 'exact':
        raise ValueError(f'rotate={rotate!r} needs layer_norms="exact", got {layer_norms!r}')
    for name, module in model.named_modules():
        # Not torch.compile's wrapper: in torch 2.4, `eval()` does not change its flag.
        if module.training and not hasattr(module, '_orig_mod'):
            raise ValueError(f"model: {name or 'it'} is in training mode; call model.eval() first")
    check_names()
    model = unwrapped(model)
    with uncompiled(model):
        plan = FoldPlan(model, layer_norms)
        runs, dtype = _find(plan, plan.example if example is None else example)
        check(plan)
        online = {name for name, norm in plan.norms.items() if statistic_of(norm)}
        if strict:
            _refuse_kept(plan, online)
        if layer_norms == 'exact' and (online or rotate):
            _find_changes(plan, runs, dtype, rotate)
        difference = verify(plan, runs, dtype) if runs else None
        if strict:
            _refuse_kept(plan, online)  # the verification keeps norms, too
        is_refused = changes_hidden_states(plan, runs, dtype)
        for name, new in apply(plan, plan.model).items():
            plan.folds[name].left = _left(new.arguments)
        if is_refused:
            refuse_hidden_states(plan.model)
        folds = plan.folds.values()
        return FusionReport(
            folded=tuple(fold for fold in folds if not fold.obstacle and not fold.left),
            reduced=tuple(fold for fold in folds if fold.left),
            kept=tuple(fold for fold in folds if fold.obstacle and not fold.left), difference=difference,
            streams=tuple(plan.changes))


def _find(plan: FoldPlan, example) -> tuple[list[Run], torch.dtype | None]:
    """Step 1: finds the target of each norm. Returns the runs that succeed, and their dtype or None."""
    runs, kind = [] if example is None else runs_of(example), type(plan.model).__name__
    why = f'no fold rule can run {kind}: pass example=, such as torch.randn(1, 3, 224, 224)'
    size = sum(parameter.numel() for parameter in plan.model.parameters())
    for dtype in (torch.float64, None) if runs and (plan.affines or plan.joints) else ():
        if dtype is not None and size > _LARGEST_MODEL:
            continue
        with suppress(RuntimeError) if dtype is not None else nullcontext():  # not all models run in float64
            folds, succeeded, error = find(copy_of(plan.model, dtype), plan, runs, dtype)
            if succeeded:
                plan.folds = {fold.norm: fold for fold in folds}
                return succeeded, dtype
            why = f'{kind} does not run on the example of its fold rule ({error}); pass another example= to fuse_norms'
    plan.joints.clear()  # they could not be verified
    plan.folds = {name: Fold(name, type(norm).__name__, obstacle=plan.obstacles[name] or why)
                  for name, norm in plan.norms.items()}
    return [], None


def _refuse_kept(plan: FoldPlan, online: set[str]) -> None:
    if kept := [fold for fold in plan.folds.values() if fold.obstacle or fold.norm in online]:
        listed = '\n'.join(f'  {norm} ({kind}): {why}' for norm, kind, why in by_reason(map(_without_fold, kept)))
        raise NotFoldedError(f'strict=True, and {plural(len(kept), "norm")} cannot be folded:\n{listed}')


def _without_fold(fold: Fold) -> Fold:
    """A norm that cannot fold whole, with the reason."""
    return fold if fold.obstacle else Fold(fold.norm, fold.kind, obstacle=(
        f'{fold.kind} computes its statistics at inference; without strict all but a scale of each token is folded'))


def _left(arguments: dict | None) -> str:
    """What stays of a norm that becomes a TokenScale of these arguments; '' if it becomes none."""
    if arguments is None:
        return ''
    if arguments['statistic'] == 'variance':
        return f'its mean and {SCALE}'
    if arguments.get('linear'):
        return f'{SCALE} and a linear layer'
    return f'{SCALE}, gamma and beta' if arguments['affine'] else SCALE


def _find_changes(plan: FoldPlan, runs: list[Run], dtype: torch.dtype | None, rotate: str | None) -> None:
    """Finds the residual streams of a plan and the changes of their bases, or why there are none."""
    why, streams = 'the model does not run in float64', []
    if runs and dtype is not None:
        with torch.inference_mode(False):  # gradients need tensors that are made outside of it
            twin = copy_of(plan.model, dtype)
            apply(plan, twin)
        try:
            with torch.inference_mode(False):
                streams, why = find_streams(twin, plan, runs[0], dtype), 'its input is no sum of outputs'
        except Exception as error:  # a model that takes no gradients, or writes to its parameters
            why = f'no residual stream was found ({type(error).__name__}: {error})'
    reasons = dict.fromkeys((name for name, norm in plan.norms.items() if statistic_of(norm) == 'variance'), why)
    for number, stream in enumerate(streams):
        reasons.update(dict.fromkeys(stream.norms, stream.obstacle or _add_change(plan, stream, rotate, number)))
    for fold in plan.folds.values():
        fold.why_left = reasons.get(fold.norm, '')


def _add_change(plan: FoldPlan, stream: ResidualStream, rotate: str | None, seed: int) -> str:
    """Adds the change of a stream to a plan, without a rotation if none is possible. Returns what is not possible."""
    obstacle = ''
    for kind in dict.fromkeys((rotate, None)):
        change = change_of(plan, stream, kind, seed)
        if change is None:
            break
        why = obstacle_of(plan, change)
        if not why:
            plan.changes.append(change)
            return obstacle and f'not rotated: {obstacle}'
        obstacle = obstacle or why
    return obstacle
