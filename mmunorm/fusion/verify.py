"""Step 3 of folding: compares a folded copy with the model before the model is changed.

A norm that makes a difference is found by halving the set of folds, and kept; so is a basis of a residual stream.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..modules import tensors_in
from .apply import apply
from .basis import BasisChange
from .examples import Run, copy_of
from .joint import JointFold
from .partial_calls import hugging_face_models
from .plan import FoldPlan
from .report import Fold, NotExactError

# Relative to the largest value. Rounding errors are smaller, in every dtype; in float64 only wrong algebra is larger.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_SAMPLE = 2**18  # number of values compared in each output of a layer


Unit = list[Fold | JointFold]


class _Differs(Exception):
    """A folded copy and its model differ; the message is how, as a sentence without its end."""


class _Outputs(NamedTuple):
    model: list[Tensor]
    layers: dict[str, list[Tensor]]  # by name, of each call


def verify(plan: FoldPlan, runs: Sequence[Run], dtype: torch.dtype | None) -> float | None:
    """The largest difference between a model and its folded copy, relative to the largest value of an output.

    Compares the outputs of the model and of the layers that norms are folded into, on `runs` in `dtype`, None for the
    model's own. Sets the obstacle of each fold with which they differ by more than rounding, and takes back the changes
    of bases with which they do. Returns None if the runs returned no tensor and no such layer ran.

    Raises:
        NotExactError: they differ with no norm folded.
    """
    with suppress(_Differs):
        return _difference(plan, runs, dtype)
    units, changes, plan.changes = _units(plan), plan.changes, []

    def with_folds(chosen: Sequence[Unit]) -> float | None:
        for unit in units:
            for part in unit:
                part.obstacle = '' if unit in chosen else 'is left out'
        return _difference(plan, runs, dtype)

    def with_changes(chosen: Sequence[BasisChange]) -> float | None:
        plan.changes = list(chosen)
        return _difference(plan, runs, dtype)

    difference, reasons = _without_culprits(units, with_folds)
    for unit in units:
        for part in unit if id(unit) in reasons else ():
            has_rule = isinstance(part, JointFold) or bool(part.pads or part.joint)
            part.obstacle = (f'{reasons[id(unit)]} when it is folded: it has a consumer other than linear layers, '
                             'another formula than its affine()' + ', or a wrong fold rule' * has_rule)
    if changes:
        difference, reasons = _without_culprits(changes, with_changes)
        for change in changes:
            for name in change.norms if id(change) in reasons else ():
                plan.folds[name].why_left = 'outputs differ if its residual stream has another basis'
    return difference


def changes_hidden_states(plan: FoldPlan, runs: Sequence[Run], dtype: torch.dtype | None) -> bool:
    """Whether folded models of transformers return other hidden states where they are asked for them."""
    if not runs or not hugging_face_models(plan.model):
        return False
    twin = copy_of(plan.model, dtype)
    apply(plan, twin)
    before, after = (_hidden_states(model, runs, dtype) for model in (copy_of(plan.model, dtype), twin))
    if not before:
        return bool(plan.changes)
    return any(difference > _TOLERANCE.get(dtype, 0.1) for difference in _differences(before, after, dtype))


def _hidden_states(model: nn.Module, runs: Sequence[Run], dtype: torch.dtype | None) -> list[Tensor]:
    """The hidden states that models of transformers return, in each run of a model."""
    found: list[Tensor] = []

    def record(module, args, output):
        found.extend(map(_sample, tensors_in(getattr(output, 'hidden_states', None))))

    for part in hugging_face_models(model):
        part.config.output_hidden_states = True
        part.register_forward_hook(record)
    with suppress(Exception):  # not all models can return them
        _run(model, runs, (), dtype)
    return found


def _without_culprits(units: Sequence, difference_with: Callable[[Sequence], float | None]
                      ) -> tuple[float | None, dict[int, str]]:
    """Leaves out the units with which a folded copy differs; the copy is last compared with all others.

    Returns its difference, and how the copy differed with each unit that is left out, by the unit's id.
    """
    reasons: dict[int, str] = {}  # of the last copy that had the unit and differed
    difference = None

    def why(chosen: Sequence) -> str:
        """How a copy with these units differs, or ''."""
        nonlocal difference
        try:
            difference = difference_with(chosen)
        except _Differs as error:
            reasons.update((id(unit), str(error)) for unit in chosen)
            return str(error)
        return ''

    remaining = list(units)
    while message := why(remaining):
        if not remaining or why([]):
            raise NotExactError(
                f'the copy to fold differs from the model before a norm is folded: {message}. The model is unchanged. '
                'If its outputs are random, or depend on ties, as detections do, pass an example= that returns '
                'features. Otherwise please report a bug.')
        culprits = _culprits(remaining, why)
        remaining = [unit for unit in remaining if unit not in culprits]
    return difference, {key: reason for key, reason in reasons.items() if key not in map(id, remaining)}


def _units(plan: FoldPlan) -> list[Unit]:
    """What is folded as a whole: a norm, or a joint fold with its norms."""
    alone = [[fold] for fold in plan.folds.values() if not fold.obstacle and fold.joint is None]
    return alone + [[joint, *plan.folds_of(joint)] for joint in plan.joints if not joint.obstacle]


def _culprits(units: list, differs: Callable[[Sequence], object]) -> list:
    """Those of `units` with which the folded copy differs, one or more; with all of them it does."""
    half = len(units) // 2
    parts = (units[:half], units[half:]) if half else ()
    return [unit for part in parts if differs(part) for unit in _culprits(part, differs)] or units


def _difference(plan: FoldPlan, runs: Sequence[Run], dtype: torch.dtype | None) -> float | None:
    """Compares a copy with all folds that have no obstacle. Raises `_Differs` if it does."""
    folds = [fold for fold in plan.folds.values() if not fold.obstacle]
    # The output of a layer is unchanged, unless a norm is folded back into it: then that norm's output is compared.
    changed = {site.layer for fold in folds for site in fold.sites if site.after}
    changed |= {name for joint in plan.joints if not joint.obstacle for name in joint.changed}
    writers = {writer.name for change in plan.changes for writer in change.stream.writers}
    changed |= {site.layer for fold in folds for site in fold.sites
                if any(f'{writer}.'.startswith(f'{site.layer}.') for writer in writers)}
    changed |= {fold.norm for fold in folds if any(site.layer in writers for site in fold.sites)}
    watched = {fold.norm if site.after else site.layer for fold in folds for site in fold.sites} - changed
    before = _run(copy_of(plan.model, dtype), runs, watched, dtype)
    twin = copy_of(plan.model, dtype)
    apply(plan, twin)
    try:
        after = _run(twin, runs, watched, dtype)
    except Exception as error:
        raise _Differs(f'the model does not run on the example ({type(error).__name__}: {error})') from error
    return _compare(before, after, dtype)


@torch.no_grad()
def _run(model: nn.Module, runs: Sequence[Run], watched: Iterable[str], dtype: torch.dtype | None) -> list[_Outputs]:
    """The outputs of each run of a model."""
    layers: dict[str, list[Tensor]] = {}

    def keep(name: str):
        return lambda module, args, output: layers.setdefault(name, []).extend(map(_sample, tensors_in(output)))

    for name in watched:
        with suppress(RuntimeError):  # scripted modules do not support hooks
            model.get_submodule(name).register_forward_hook(keep(name))
    found = []
    for run in runs:
        layers.clear()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a dropout that is always on
            found.append(_Outputs(list(tensors_in(run(model, dtype))), dict(layers)))
    return found


def _sample(output: Tensor) -> Tensor:
    values = output.detach().flatten()
    return values[::max(len(values) // _SAMPLE, 1)].clone()


def _compare(before: Sequence[_Outputs], after: Sequence[_Outputs], dtype: torch.dtype | None) -> float | None:
    differences = []
    for one, other in zip(before, after, strict=True):
        layers = [(f'the output of {name}', outputs, other.layers.get(name, []))
                  for name, outputs in one.layers.items()]  # in the order in which they ran
        for where, was, is_now in [*layers, ("the model's output", one.model, other.model)]:
            limit = max((_TOLERANCE.get(output.dtype, 0.1) for output in was), default=0)
            for difference in _differences(was, is_now, dtype):
                differences.append(difference)
                if difference > limit:
                    raise _Differs(f'{where} differs by {difference:.1e} of its largest value')
    return max(differences, default=None)


def _differences(before: Sequence[Tensor], after: Sequence[Tensor], dtype: torch.dtype | None) -> list[float]:
    """The largest difference of each pair of outputs, relative to the largest value before; inf if not comparable."""
    if len(before) != len(after) or any(a.shape != b.shape for a, b in zip(before, after, strict=True)):
        return [float('inf')]
    found = []
    for a, b in zip(before, after, strict=True):
        if not a.is_floating_point():
            if dtype is not None and not torch.equal(a, b):  # class indices may change by rounding
                found.append(float('inf'))
            continue
        is_finite = a.isfinite()
        if not torch.equal(is_finite, b.isfinite()):
            found.append(float('inf'))
        elif is_finite.any():
            a, b = a[is_finite].double(), b[is_finite].double()
            found.append(((a - b).abs().max() / (a.abs().max() if a.any() else 1.)).item())
    return found
