"""Step 3 of folding: compares a folded copy with the model before the model is changed."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from ..modules import tensors_in
from .basis import Rotation
from .examples import Run, copy_of
from .folds import Fold, JointFold
from .norms import statistic_of
from .obstacles import Obstacle
from .plan import FoldPlan
from .rewrite import apply

# Relative to the largest value. Rounding errors are smaller, in every dtype; in float64 only wrong algebra is larger.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_SAMPLE = 2**18  # number of values compared in each output of a layer
_HALF_TYPES = (torch.float16, torch.bfloat16)
# A rotation is taken back if it makes the error of a model in half precision larger by this factor.
_MOST_ROUNDING = 1.25
_MODEL = "the model's output"


class NotExactError(RuntimeError):
    """The folded copy of a model does not compute the same as the model."""


class _Differs(Exception):
    """A folded copy and its model differ; the message is how, as a sentence without its end."""


_Outputs = dict[str, list[Tensor]]  # of a run: those of layers, then those of the model, each by what they are


def verify(plan: FoldPlan, runs: Sequence[Run], dtype: torch.dtype | None) -> float | None:
    """The largest difference between a model and its folded copy, relative to the largest value of an output.

    Compares the outputs of the model and of the layers that norms are folded into, on `runs` in `dtype`, None for the
    model's own. By bisection it finds the folds, rotations and attentions with which they differ by more than rounding,
    and takes these back. Returns None if the runs returned no tensor and no such layer ran.

    Raises:
        NotExactError: they differ with no norm folded, or outputs are NaN.
    """
    with suppress(_Differs):
        return _difference(plan, runs, dtype)
    folds, rotations, attentions = _units(plan), plan.rotations, plan.attentions
    difference, chosen, reasons = None, [], {}

    def add(units: Sequence) -> None:
        """Chooses units as well, or those of them with which the copy does not differ."""
        nonlocal difference, chosen
        tried = [*chosen, *units]
        for unit in folds:
            for part in unit:
                part.obstacle = None if unit in tried else Obstacle('differs', detail=reasons.get(id(unit), ''))
        plan.rotations = [rotation for rotation in rotations if rotation in tried]
        plan.attentions = [attention for attention in attentions if attention in tried]
        try:
            difference, chosen = _difference(plan, runs, dtype), tried
        except _Differs as error:
            reasons.update((id(unit), str(error)) for unit in units)
            if not tried:
                raise NotExactError(
                    f'the copy to fold differs from the model before a norm is folded: {error}. The model is unchanged.'
                    ' If its outputs are random, or depend on ties, as detections do, pass an example= that returns '
                    'features. Otherwise please report a bug.') from error
            if half := len(units) // 2:
                add(units[:half])
                add(units[half:])

    add([])
    add([*folds, *rotations, *attentions])
    add([])  # what was tried last may have been left out
    for rotation in rotations:
        if rotation not in chosen:
            _take_back(plan, rotation, Obstacle('stream differs', detail=reasons[id(rotation)]))
    return difference


def _take_back(plan: FoldPlan, rotation: Rotation, obstacle: Obstacle) -> None:
    for name in rotation.stream.norms:
        plan.folds[name].not_rotated = obstacle


@torch.no_grad()
def check_rounding(plan: FoldPlan, runs: Sequence[Run]) -> float | None:
    """The error of the folded copy of a model in half precision against the model in float64; None in other types.

    Takes rotations back if they lose precision: a large channel of a stream is then in all channels.
    """
    half = next((parameter.dtype for parameter in plan.model.parameters() if parameter.dtype in _HALF_TYPES), None)
    if half is None or not runs:
        return None

    def outputs(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        return [tensor for run in runs for tensor in tensors_in(run(model, dtype)) if tensor.is_floating_point()]

    with suppress(RuntimeError):  # not all models run in float64
        exact = outputs(copy_of(plan.model, torch.float64), torch.float64)
        before, after = (_error(outputs(model, half), exact) for model in (copy_of(plan.model), _folded(plan)))
        if plan.rotations and after > _MOST_ROUNDING * before:
            rotated, plan.rotations = plan.rotations, []
            name = str(half).removeprefix('torch.')
            detail = f'in {name} the error of the model grows from {before:.1e} to {after:.1e}'
            for rotation in rotated:
                _take_back(plan, rotation, Obstacle('half', detail=detail))
            after = _error(outputs(_folded(plan), half), exact)
        return after
    return None


def _error(outputs: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max((((a.double() - b).norm() / b.norm()).item() for a, b in zip(outputs, exact, strict=True)
                if b.any()), default=0.)


def _units(plan: FoldPlan) -> list[list[Fold | JointFold]]:
    """What is folded as a whole: a norm, or a joint fold with its norms."""
    alone = [[fold] for fold in plan.folds.values() if not fold.obstacle and fold.joint is None]
    return alone + [[joint, *plan.folds_of(joint)] for joint in plan.joints if not joint.obstacle]


def _folded(plan: FoldPlan, dtype: torch.dtype | None = None) -> nn.Module:
    twin = copy_of(plan.model, dtype)
    apply(plan, twin)
    return twin


def _difference(plan: FoldPlan, runs: Sequence[Run], dtype: torch.dtype | None) -> float | None:
    """Compares a copy with all folds that have no obstacle. Raises `_Differs` if it does."""
    for norm in (norm for rotation in plan.rotations for norm in rotation.stream.norms):
        if plan.folds[norm].obstacle and not statistic_of(plan.norms[norm]):
            raise _Differs(f'the output of {norm}, which is kept, differs')
    watched = _unchanged_outputs(plan)
    before = _run(copy_of(plan.model, dtype), runs, watched, dtype)
    twin = _folded(plan, dtype)
    try:
        after = _run(twin, runs, watched, dtype)
    except Exception as error:
        raise _Differs(f'the model does not run on the example ({type(error).__name__}: {error})') from error
    return _compare(before, after, dtype)


def _unchanged_outputs(plan: FoldPlan) -> set[str]:
    """The modules whose outputs stay: layers that norms are folded into, or the norm if it is folded back into one."""
    folds = [fold for fold in plan.folds.values() if not fold.obstacle]
    changed = {site.layer for fold in folds for site in fold.sites if site.after}
    changed |= {name for joint in plan.joints if not joint.obstacle for name in joint.changed}
    changed |= {writer.name for rotation in plan.rotations for writer in rotation.stream.writers}
    changed |= {site.layer for attention in plan.attentions for site, _, _ in attention.changes}
    changed |= {fold.norm for fold in folds if any(site.layer in changed for site in fold.sites if site.after)
                and plan.rotations}
    watched = {fold.norm if site.after else site.layer for fold in folds for site in fold.sites}
    # A module that holds a changed layer, such as torch's attention, returns something else, too.
    return {name for name in watched - changed if not any(part.startswith(f'{name}.') for part in changed)}


@torch.no_grad()
def _run(model: nn.Module, runs: Sequence[Run], watched: Iterable[str], dtype: torch.dtype | None) -> list[_Outputs]:
    """The outputs of each run of a model."""
    layers: _Outputs = {}

    def keep(name: str, module: nn.Module, args, output) -> None:
        layers.setdefault(f'the output of {name}', []).extend(map(_sample, tensors_in(output)))

    for name in watched:
        with suppress(RuntimeError):  # scripted modules do not support hooks
            model.get_submodule(name).register_forward_hook(partial(keep, name))
    found = []
    for run in runs:
        layers.clear()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a dropout that is always on
            output = list(tensors_in(run(model, dtype)))
        found.append({**layers, _MODEL: output})
    return found


def _sample(output: Tensor) -> Tensor:
    values = output.detach().flatten()
    return values[::max(len(values) // _SAMPLE, 1)].clone()


def _compare(before: Sequence[_Outputs], after: Sequence[_Outputs], dtype: torch.dtype | None) -> float | None:
    differences = []
    for one, other in zip(before, after, strict=True):
        if any(output.is_floating_point() and output.isnan().any() for output in one[_MODEL]):
            raise NotExactError('the outputs of the model are NaN on the example, so that a fold cannot be verified. '
                                'The model is unchanged. Pass an example= of real inputs.')
        for where, was in one.items():
            limit = max((_TOLERANCE.get(output.dtype, 0.1) for output in was), default=0)
            for difference in _differences(was, other.get(where, []), dtype):
                differences.append(difference)
                if difference > limit:
                    raise _Differs(f'{where} differs by {difference:.1e} of its largest value')
    return max(differences, default=None)


def _differences(before: Sequence[Tensor], after: Sequence[Tensor], dtype: torch.dtype | None) -> list[float]:
    """The largest difference of each pair of outputs, relative to the largest value before; inf if not comparable."""
    if [a.shape for a in before] != [b.shape for b in after]:
        return [torch.inf]
    found = []
    for a, b in zip(before, after, strict=True):
        is_finite = a.isfinite()
        if not a.is_floating_point():  # class indices may change by rounding
            found += [torch.inf] * (dtype is not None and not torch.equal(a, b))
        elif not torch.equal(is_finite, b.isfinite()):
            found.append(torch.inf)
        elif is_finite.any():
            a, b = a[is_finite].double(), b[is_finite].double()
            found.append(((a - b).abs().max() / (a.abs().max() if a.any() else 1.)).item())
    return found
