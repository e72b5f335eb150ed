"""Folds the norms of a model in four steps: trace, check, verify, apply."""
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress

import torch
from torch import Tensor, nn

from ..modules import uncompiled, unwrapped
from ..norms.base import check_choice
from ..utils import check_module, plural
from .attention import OutputMeans, find_attentions
from .basis import rotation_of
from .check import check
from .examples import Run, copy_of, runs_of
from .folds import Fold, ancestors
from .norms import statistic_of
from .obstacles import Obstacle
from .plan import FoldPlan
from .recorder import Trace
from .report import PLAIN, FusionReport, by_reason
from .rewrite import apply
from .scopes import hugging_face_models
from .streams import find_streams
from .targets import fold_of
from .trace import trace
from .verify import check_rounding, verify

_MOST_IMAGES = 512  # of calibration
_LARGEST_MODEL = 10**9  # parameters; a larger one is not copied in float64


class NotFoldedError(ValueError):
    """Norms cannot be folded, and `strict` is set."""


def fuse_norms(model: nn.Module, strict: bool = False, example=None, layer_norms: str = 'exact',
               rotate: str | None = None, calibration: Tensor | Iterable | Callable | None = None) -> FusionReport:
    """Folds the norms of `model` into the adjacent layers, in place: offline norms whole, of LayerNorms the weights.

    Offline norms are those of mmunorm, every other norm with `affine()`, and torch's BatchNorm, frozen or not
    (Algorithm 1). Of a LayerNorm or RMSNorm, gamma and beta fold into the layers that consume it; the same norm without
    weights is left. The function of the model stays the same: before it is changed, a folded copy is compared with it
    on an example, and norms that cannot be folded exactly are kept. Layers get new tensors: an optimizer or a
    state_dict keeps the old ones. Folding a folded model changes nothing.

    Tokens between the layers of a folded model may lack a norm, or be in another basis. So calling a part of it that
    returns them is an error, unless an example does: see `mmunorm.fusion.scopes`. `report.streams` has the way back.

    Args:
        model (nn.Module): a model in eval mode. Pass the whole model to fold its last norms into its head or neck.
        strict (bool): raise an error if any norm cannot be folded whole. Defaults to False.
        example: an input of the model: a tensor, a tuple of arguments, a dict of keyword arguments, a function that
            takes the model, runs it and returns the outputs to compare, or a list of these. Copies of the model run on
            each of them; tensors of images `(N, C, H, W)` or tokens `(N, L, C)` are also tried in other sizes. The fold
            holds for all inputs of the code paths that the examples take: pass one example for each. Defaults to None,
            which works for whole models of mmdet, mmpretrain, timm and mmunorm. Norms of other models are kept.
        layer_norms (str): whether LayerNorms and RMSNorms are folded: 'exact', or 'keep'. Defaults to 'exact'.
        rotate (str, optional): 'hadamard' rotates the residual streams and the heads of attentions, which spreads large
            channels over all for INT8. A LayerScale before such a stream is folded into the layer before it. Defaults
            to None: each token stays what it is.
        calibration: images with which the mean of keys and values is measured, to subtract it, so that they need less
            of a range in INT8: a batch as the model takes it, an iterable of batches or of tuples that begin with one,
            of which the first 512 images count, or a function that takes a model and runs it on them. Defaults to None:
            keys and values stay.

    Returns:
        FusionReport: where each norm was folded or why it was kept, and the largest difference on the example.

    Raises:
        ValueError: `model` or a part of it is in training mode, or `layer_norms` or `rotate` is none of the above.
        TypeError: `model` is not a module, or `example` is of another type.
        RuntimeError: the model does not run on `example`, or cannot be copied.
        NotFoldedError: `strict` is set and norms cannot be folded; lists them. `model` is unchanged.
        NotExactError: the outputs of two copies differ on `example` before a norm is folded, or are NaN. `model` is
            unchanged.
    """
    check_module(model)
    check_choice('layer_norms', layer_norms, ('exact', 'keep'))
    check_choice('rotate', rotate, (None, 'hadamard'))
    if rotate and layer_norms != 'exact':
        raise ValueError(f'rotate={rotate!r} needs layer_norms="exact", got {layer_norms!r}')
    for name, module in model.named_modules():
        # Not torch.compile's wrapper: in torch 2.4, `eval()` does not change its flag.
        if module.training and not hasattr(module, '_orig_mod'):
            raise ValueError(f"model: {name or 'it'} is in training mode; call model.eval() first")
    model = unwrapped(model)
    with uncompiled(model):
        plan = FoldPlan(model, layer_norms)
        seen, runs, dtype = _find(plan, plan.example if example is None else example, rotate)
        check(plan)
        if strict:
            _refuse_kept(plan)
        if seen is not None:
            means = {} if calibration is None else _means(plan, calibration)
            _find_rewritings(plan, seen, dtype, rotate, means)
        difference = verify(plan, runs, dtype) if runs else None
        rounding = check_rounding(plan, runs)
        if strict:
            _refuse_kept(plan)  # the verification keeps norms, too
        unseen = _unseen(plan, seen) if seen is not None else ()
        for name, new in apply(plan, plan.model).items():
            if new.left is not None:
                plan.folds[name].left = f'{PLAIN}, and a linear layer' if new.linear else PLAIN
        folds, notes = plan.folds.values(), ()
        if hugging_face_models(model) and any(not fold.obstacle or fold.left for fold in folds):
            notes = ('save_pretrained is refused from now on: use mmunorm.save_folded, and save_strategy="no" in '
                     "transformers' Trainer", )
        return FusionReport(
            folded=tuple(fold for fold in folds if not fold.obstacle and not fold.left),
            reduced=tuple(fold for fold in folds if fold.left),
            kept=tuple(fold for fold in folds if fold.obstacle and not fold.left),
            streams=tuple(rotation.new for rotation in plan.rotations), attentions=len(plan.attentions),
            difference=difference, rounding=rounding, unseen=unseen, notes=notes)


def _find(plan: FoldPlan, example, rotate: str | None) -> tuple[Trace | None, list[Run], torch.dtype | None]:
    """Step 1: finds the target of each norm. Returns what was seen, the runs that succeed, and their dtype or None."""
    runs, kind = [] if example is None else runs_of(example), type(plan.model).__name__
    if not rotate and hugging_face_models(plan.model):
        runs += [run.with_hidden_states() for run in runs if isinstance(run.example, (Tensor, dict))]
    why = Obstacle('no example', kind)
    is_large = sum(parameter.numel() for parameter in plan.model.parameters()) > _LARGEST_MODEL
    dtypes = (None, ) if is_large else (torch.float64, None)
    for dtype in dtypes if runs and (plan.affines or plan.joints) else ():
        with suppress(RuntimeError) if dtype is not None else nullcontext():  # not all models run in float64
            seen, succeeded, error = trace(lambda dtype=dtype: copy_of(plan.model, dtype), plan, runs, dtype)
            if succeeded:
                plan.folds = {name: fold_of(name, seen, plan) for name in plan.norms}
                return seen, succeeded, dtype
            why = Obstacle('wrong example', kind, error)
    plan.joints.clear()  # they could not be verified
    plan.folds = {name: Fold(name, type(norm).__name__, obstacle=plan.obstacles[name] or why)
                  for name, norm in plan.norms.items()}
    return None, [], None


def _refuse_kept(plan: FoldPlan) -> None:
    kept = [(fold.norm, fold.kind, fold.where if fold.obstacle else str(Obstacle('strict', fold.kind)))
            for fold in plan.folds.values() if fold.obstacle or statistic_of(plan.norms[fold.norm])]
    if kept:
        listed = '\n'.join(f'  {norm} ({kind}): {why}' for norm, kind, why in by_reason(kept))
        raise NotFoldedError(f'strict=True, and {plural(len(kept), "norm")} cannot be folded:\n{listed}')


def _find_rewritings(plan: FoldPlan, seen: Trace, dtype: torch.dtype | None, rotate: str | None,
                     means: dict[str, Tensor]) -> None:
    """Finds the residual streams that can be rotated, or why not, and the attentions that can be rewritten."""
    if rotate:
        reasons = dict.fromkeys((name for name, norm in plan.norms.items() if statistic_of(norm)),
                                Obstacle('no stream' if dtype else 'no float64'))
        for number, stream in enumerate(find_streams(seen, plan) if dtype else ()):
            found = rotation_of(plan, stream, number)
            obstacle = found if isinstance(found, Obstacle) else None
            plan.rotations += [] if obstacle else [found]
            reasons.update(dict.fromkeys(stream.norms, obstacle))
        for fold in plan.folds.values():
            fold.not_rotated = reasons.get(fold.norm)
    if dtype and (rotate or means):
        plan.attentions = find_attentions(seen, plan, bool(rotate), means)


@torch.no_grad()
def _means(plan: FoldPlan, calibration: Tensor | Iterable | Callable) -> dict[str, Tensor]:
    """The mean outputs of the model's linear layers for these images."""
    model, like = copy_of(plan.model), next(plan.model.parameters())
    measured, number = OutputMeans(model), 0
    with measured:
        if callable(calibration):
            calibration(model)
            return measured.means()
        for batch in [calibration] if isinstance(calibration, Tensor) else calibration:
            batch = batch[0] if isinstance(batch, (tuple, list)) else batch
            model(batch.to(like))
            if (number := number + len(batch)) >= _MOST_IMAGES:
                break
    return measured.means()


def _unseen(plan: FoldPlan, seen: Trace) -> tuple[str, ...]:
    """Modules with parameters that no example reached. Warns where a folded norm feeds what they are a part of."""
    owners: dict[str, None] = {}
    for name, _ in plan.model.named_parameters():
        owner = name.rpartition('.')[0]
        if name not in seen.used and not any(owner == norm or owner.startswith(f'{norm}.') for norm in seen.reads) and (
                not isinstance(plan.modules[owner], torch.jit.ScriptModule)):
            owners[owner] = None
    layers = {site.layer: fold.norm for fold in plan.folds.values() if not fold.obstacle for site in fold.sites}
    for owner in owners:
        around = next((part for part in (owner, *reversed(ancestors(owner))) if part in seen.called), '')
        if fed := next((norm for layer, norm in layers.items() if around and layer.startswith(f'{around}.')), ''):
            warnings.warn(f'no example reached {owner}, a part of {around}, into which the norm {fed} was folded: for '
                          'inputs that reach it the folded model is another one. Pass an example for each such path',
                          stacklevel=4)
    return tuple(owners)
