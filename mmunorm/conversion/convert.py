"""Converts the LayerNorms of a trained model to offline norms, without training."""
from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..norms import OfflineNorm
from ..norms.base import check_norm_cfg
from ..norms.layers import channel_axis, has_affine, input_of, is_channels_first, is_norm
from ..norms.replace import (
    build_like,
    check_replaceable,
    disable_fast_path,
    eps_of,
    is_rms,
    layer_norms,
    no_layer_norms,
    set_submodules,
    with_fused_parts,
)
from ..registry import MODELS, print_log
from ..utils import check_module, error_text, eval_mode
from .calls import OtherReaders, watched
from .images import all_batches, suspicious
from .replay import MEMORY, Replay
from .report import ConversionError, ConversionReport, ConvertedNorm
from .statistics import (
    NUM_SUMS,
    deviations,
    mean_and_square,
    nearest_affine,
    relative_error,
    scale_and_shift,
    token_sums,
    tokens_of,
    valid_tokens,
)

UN_CFG = dict(type='UN')
TOLERANCE = 0.02  # how far the output of a LayerNorm may be from the formula, as a share of its size; bfloat16 rounds


class _Enough(Exception):
    """Ends a forward pass: nothing after the measured norm is needed."""


@torch.inference_mode(False)  # parameters made inside it cannot be trained
@torch.no_grad()
def convert_norms(model: nn.Module,
                  batches,
                  norm_cfg: dict = UN_CFG,
                  keep: Sequence[str] = (),
                  progress: bool = False) -> ConversionReport:
    """Replaces every LayerNorm and RMSNorm of a trained model by the nearest offline norm, in place.

    An offline norm is a map `a * x + b` for each channel. It is fitted to LayerNorm by least squares over the tokens
    of `batches`:

        a = gamma * Cov(x, u) / Var(x)      b = beta + gamma * E[u] - a * E[x]      u = (x - mu) / sigma

    Norms are converted one by one in the order in which they run, each on inputs from the converted layers before it.
    This takes as long as five to six forward passes over all batches; up to 2 GiB of blocks' outputs are cached. A
    last pass measures the errors; if they differ from those of the fit, all norms are fitted again in full passes. A
    norm that runs several times is fitted over all its runs. Only the norms' weights change.

    Args:
        model (nn.Module): a trained model of any library, with LayerNorms or RMSNorms over the channels of `(..., C)`
            or `(N, C, H, W)`. For RMSNorm, `mu = 0` and the mean square replaces the variance.
        batches: a few hundred training images, without augmentation, which are held in memory: a data set or the
            DataLoader of one, of which 512 evenly spaced images are used; a list of images `(C, H, W)`; or batches. A
            tensor or Mapping is one batch. In an Iterable, a batch is a tensor; a tuple or list, whose first entry is
            the input; or a Mapping, as from OpenMMLab's data loaders, or of keyword arguments for other models. Tensors
            are moved to the model's device.
        norm_cfg (dict): config of the new norms: UN, MABN, TokenBN, RepBN, or PN without `layer_scale`. `eta` starts
            at 0. Defaults to `dict(type='UN')`.
        keep (Sequence[str]): regular expressions; a LayerNorm whose full name matches one of them is kept.
        progress (bool): show a progress bar. Defaults to False.

    Returns:
        ConversionReport: the error of each norm, and what is suspicious about the images. A LayerNorm is kept, with a
            reason in the report, if it did not run, if it is a subclass with another formula (other than 1 + gamma for
            gamma), if it is called with arguments other than its input and a pad mask, or if its weight or bias is read
            outside of its calls.

    Raises:
        TypeError: `model` is no module, or `norm_cfg` is not a dict with a `type` or has a misspelt argument.
        KeyError: no norm of this type is registered.
        ConversionError: a ValueError: `norm_cfg` is not an offline norm, `model` has no LayerNorm that can be
            converted or one that cannot be replaced, an entry of `keep` matches nothing, there are no batches, or
            activations are not finite. After any error, `model` is unchanged.
    """
    check_module(model)
    check_norm_cfg(norm_cfg)
    names = layer_norms(model)
    if not names or '' in names:
        what = no_layer_norms(model) if not names else 'is itself a LayerNorm, not a model with some'
        others = ''.join(f'; {other} is none' for other in _others(model, names)[:1])
        raise ConversionError(f'model: {type(model).__name__} {what}{others}')
    kept = dict.fromkeys(_matching(names, keep), 'as was asked for')
    wanted = {name: norm for name, norm in names.items() if norm not in kept}
    if not wanted:
        raise ConversionError(f'keep={list(keep)!r} keeps all LayerNorms')
    try:
        check_replaceable(wanted)
    except ValueError as error:
        raise ConversionError(f'{error}; `keep` lets it stay') from error
    goals = {norm: goal_like(norm_cfg, norm, model) for norm in wanted.values()}
    return _convert_all(model, batches, names, goals, kept, progress)


def _matching(names: dict[str, nn.Module], keep: Sequence[str]) -> Iterator[nn.Module]:
    """The LayerNorms whose names some regular expressions match as a whole."""
    for pattern in keep:
        try:
            found = [norm for name, norm in names.items() if re.fullmatch(pattern, name)]
        except re.error as error:
            raise ConversionError(f'keep: {pattern!r} is no regular expression: {error}') from None
        if not found:
            raise ConversionError(f'keep: no LayerNorm has a name that {pattern!r} matches as a whole; '
                                  f'names are such as {next(iter(names))!r}')
        yield from found


def goal_like(norm_cfg: dict, norm: nn.Module, model: nn.Module) -> OfflineNorm:
    """Builds the offline norm that replaces a LayerNorm of a model. Raises a ConversionError if that is impossible.
    """
    kind = norm_cfg['type']
    goal = kind if isinstance(kind, type) else MODELS.module_dict.get(kind)
    why = 'is no offline norm over tokens'
    if not isinstance(goal, type) or issubclass(goal, OfflineNorm):
        try:
            goal = build_like(norm_cfg, norm, model)
        except (TypeError, ValueError) as error:
            raise ConversionError(f'norm_cfg={norm_cfg!r}: {error}') from error
        if is_channels_first(norm) or not is_channels_first(goal):
            why = goal.fold_obstacle
    if why:
        name = getattr(goal, '__name__', type(goal).__name__)
        raise ConversionError(f'norm_cfg={norm_cfg!r}: {name} {why}; take UN, MABN, TokenBN or RepBN')
    return goal


@torch.no_grad()
def convert_loaded(model: nn.Module, batches, progress: bool = False) -> ConversionReport:
    """Fits offline norms in place to the LayerNorms whose weight and bias were loaded into them.

    Offline norms that load a LayerNorm checkpoint have its `weight` and `bias` and no statistics (`lacks_statistics`).
    This function fits each of them, and each norm that loaded nothing, to LayerNorm with this weight and bias, like
    :func:`convert_norms`. Modules and parameters stay the same objects, so an optimizer remains valid. LayerNorm's
    `eps` is assumed to be that of the norm.

    Args:
        model (nn.Module): a model with such norms.
        batches, progress: as for :func:`convert_norms`.

    Returns:
        ConversionReport: as of :func:`convert_norms`. A norm that did not run is unchanged.

    Raises:
        ConversionError: a ValueError: no norm lacks statistics, one of them is not an affine map, there are no
            batches, or activations are not finite. After any error, `model` is unchanged.
    """
    norms = norms_to_fit(model)
    lacking = {norm: norm.lacks_statistics for norm in norms.values()}
    if not any(lacking.values()):
        raise ConversionError('model: no norm has the scale of a LayerNorm and no statistics')
    for name, norm in norms.items():
        if norm.fold_obstacle:
            raise ConversionError(f'{name}: {type(norm).__name__} {norm.fold_obstacle}')
    old = {norm: layer_norm_of(norm) for norm in norms.values()}
    states = {norm: {key: value.clone() for key, value in norm.state_dict().items()} for norm in old}
    names = {name: old[norm] for name, norm in norms.items()}
    set_submodules(model, names)
    try:
        return _convert_all(model, batches, names, {layer_norm: norm for norm, layer_norm in old.items()}, {}, progress)
    except BaseException:
        for norm, state in states.items():
            norm.load_state_dict(state)
            norm.lacks_statistics = lacking[norm]
        raise
    finally:
        set_submodules(model, norms)


def norms_to_fit(model: nn.Module) -> dict[str, OfflineNorm]:
    """The norms that :func:`convert_loaded` fits, by full name."""
    return {name: norm for name, norm in model.named_modules(remove_duplicate=False)
            if isinstance(norm, OfflineNorm) and (norm.lacks_statistics or norm.is_fresh)}


@torch.no_grad()
def layer_norm_of(norm: OfflineNorm) -> nn.LayerNorm:
    """The LayerNorm that has the scale and shift of an offline norm."""
    if is_channels_first(norm):
        from mmpretrain.models.utils import LayerNorm2d as cls  # here: convert_norms runs without it
    else:
        cls = nn.LayerNorm
    new = cls(norm.num_features, eps=norm.eps).to(norm.weight)
    new.weight.copy_(norm.weight)
    new.bias.copy_(norm.bias)
    return new


@torch.no_grad()
def with_layer_norms(model: nn.Module) -> nn.Module:
    """A copy of a model that is about to be converted by :func:`convert_loaded`, with the LayerNorms themselves."""
    teacher = copy.deepcopy(model)
    set_submodules(teacher, {name: layer_norm_of(norm) for name, norm in norms_to_fit(teacher).items()})
    teacher.eval()  # returns nothing in mmdet's and mmpretrain's Swin
    return teacher.requires_grad_(False)


def _convert_all(model: nn.Module, batches, names: dict[str, nn.Module], goals: dict[nn.Module, OfflineNorm],
                 kept: dict[nn.Module, str], progress: bool) -> ConversionReport:
    """Puts the goal of each LayerNorm into its place, fitted to it; `names` has all LayerNorms, also those `kept`."""
    with eval_mode(model):
        batches = all_batches(batches, partial(_takes, model))
    if not batches:
        raise ConversionError('batches: there is none to take statistics from')
    places = {norm: with_fused_parts(goal, norm) for norm, goal in goals.items()}
    before: dict[nn.Module, _Seen] = {}
    for name, norm in names.items():
        before.setdefault(norm, _Seen(norm, name))

    with eval_mode(model, *places.values()), tqdm(
            total=len(batches) * (2 + len(goals)), desc='calibrating', unit='batch',
            disable=None if progress else True) as bar:
        changes = disable_fast_path(model, [name for name in names if names[name] in goals])
        try:
            with OtherReaders(before) as readers:
                before = _measure_all(model, batches, before, bar)
            for norm, function in readers.found.items():
                before[norm].obstacle = before[norm].obstacle or (
                    f'has a weight or bias that {function} reads outside of it')
            obstacles = {norm: seen.obstacle or 'did not run on these samples' for norm, seen in before.items()
                         if seen.obstacle or not seen.tokens}
            goals = {norm: goals[norm] for norm in before if norm in goals and norm not in obstacles}
            if not goals:
                why = next(f'{before[norm].name} {why}' for norm, why in obstacles.items() if norm not in kept)
                which = 'its LayerNorm cannot' if len(before) == 1 else f'none of its {len(before)} LayerNorms can'
                raise ConversionError(f'model: {which} be converted: {why}')
            for norm, seen in before.items():
                if norm not in obstacles:
                    seen.check('in the model as it is')
            for memory in (MEMORY, 0):
                now, fits, left = {}, {}, set(goals)  # what each norm reads after the converted ones
                with Replay(model, goals, memory) as replay:
                    for norm, goal in goals.items():
                        now[norm] = _measure(model, batches, norm, before[norm], left, replay, bar)
                        goal.set_affine(*now[norm].nearest(), *mean_and_square(now[norm].sums))
                        fits[norm] = now[norm].error_of(goal)
                        left.remove(norm)
                        set_submodules(model, {name: places[norm] for name, each in names.items() if each is norm})
                after = _measure_all(model, batches, {goal: before[norm].again() for norm, goal in goals.items()}, bar)
                errors = {norm: after[norm].error_of(goal) for norm, goal in goals.items()}
                if memory == 0 or all(math.isclose(errors[norm], fit, rel_tol=0.01, abs_tol=1e-5)
                                      for norm, fit in fits.items()):
                    break
                print_log('In the finished model the errors of the norms are not those of the fit: fitting them again, '
                          'in whole passes', 'current')
                set_submodules(model, names)
            for norm in goals:
                after[norm].check('after the norms that are converted')
        except BaseException:
            set_submodules(model, names)
            for module, name, value in changes:
                setattr(module, name, value)
            raise
    kept = {**obstacles, **kept}
    rows = []
    for norm, seen in before.items():
        measured = {} if norm in obstacles else dict(seen.spread(), least_affine=seen.error(*seen.nearest()))
        if norm in goals:
            measured.update(before=now[norm].error(*seen.nearest()), after=errors[norm])
        rows.append(ConvertedNorm(seen.name, **measured, kept=kept.get(norm, '')))
    return ConversionReport(tuple(rows), sum(map(_num_samples, batches)), _others(model, names), suspicious(batches))


def _others(model: nn.Module, names: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Names and classes of norms, or what looks like one, that are not in `names` and keep no running statistics."""
    def looks_like_one(name: str, module: nn.Module) -> bool:
        is_called_so = 'norm' in f'{name.rpartition(".")[2]} {type(module).__name__}'.lower()
        return is_norm(module) or is_called_so and not list(module.children()) and (
            {parameter.dim() for parameter in module.parameters()} == {1})

    known = set(names.values())
    return tuple(f'{name} ({type(module).__name__})' for name, module in model.named_modules()
                 if module not in known and looks_like_one(name, module)
                 and not has_affine(module) and getattr(module, 'running_var', None) is None)


class _Seen:
    """Statistics of the inputs of one LayerNorm."""

    def __init__(self, norm: nn.Module, name: str):
        self.norm, self.name = norm, name
        self.gamma, self.beta = scale_and_shift(norm)
        self.sums = torch.zeros(NUM_SUMS, *self.gamma.shape, dtype=torch.float64, device=self.gamma.device)
        self.sigma = self.sums.new_zeros(2)  # sums of sigma and sigma^2
        self.largest = self.sums.new_zeros(())
        self.precision = 0.
        self.tokens = 0
        self.calls: dict[int, int] = defaultdict(int)  # by batch
        self.obstacle = ''  # why no offline norm can take the norm's place

    def again(self) -> _Seen:
        """An empty one of the same norm."""
        new = _Seen(self.norm, self.name)
        new.gamma = self.gamma
        return new

    def examine(self, args: tuple, kwargs: dict, output) -> None:
        """Looks whether an offline norm takes such a call, and whether the output of the first call is LayerNorm's."""
        (x, pad_mask), dim = input_of(args, kwargs), channel_axis(self.norm, kwargs)
        shape = x.movedim(dim, -1).shape[:-1]
        is_mask = isinstance(pad_mask, Tensor) and pad_mask.dtype == torch.bool and pad_mask.shape == shape
        if len(args) > 2 or kwargs.keys() - {'x', 'pad_mask', 'data_format'} or not (pad_mask is None or is_mask):
            self.obstacle = 'is called with arguments other than x and pad_mask'
        elif not self.tokens and not self._computes(output, x, pad_mask, dim):
            kind = 'RMSNorm' if is_rms(self.norm) else 'LayerNorm'
            self.obstacle = f'is a {type(self.norm).__name__} whose output is not that of {kind} over dimension {dim}'

    def _computes(self, output, x: Tensor, pad_mask: Tensor | None, dim: int) -> bool:
        """Whether `output` is LayerNorm of `x` over dimension `dim`; gamma becomes 1 + gamma if that is its scale."""
        if not isinstance(output, Tensor) or output.shape != x.shape or x.shape[dim] != len(self.gamma):
            return False
        tokens, y = (valid_tokens(tensor.movedim(dim, -1), pad_mask) for tensor in (x, output))
        mean, sigma = deviations(tokens, eps_of(self.norm, x.dtype), not is_rms(self.norm))
        for gamma in (self.gamma, 1 + self.gamma):
            expected = (gamma * (tokens - mean) / sigma + self.beta).to(output.dtype)
            for part in self.norm.children():  # an activation
                expected = part(expected)
            if not (expected - y).norm() > TOLERANCE * expected.norm():  # NaN has a message of its own
                self.gamma = gamma
                return True
        return False

    def add(self, args: tuple, kwargs: dict, batch: int) -> None:
        """Adds a call of the norm."""
        dtype, tokens = input_of(args, kwargs)[0].dtype, tokens_of(self.norm, args, kwargs)
        self.calls[batch] += 1
        self.precision = torch.finfo(dtype).eps
        eps, centered = eps_of(self.norm, dtype), not is_rms(self.norm)
        self.tokens += len(tokens)
        if len(tokens):
            self.sums += token_sums(tokens, eps, centered)
            sigma = deviations(tokens, eps, centered)[1]
            self.sigma += torch.stack([sigma.sum(), sigma.square().sum()])
            self.largest = torch.maximum(self.largest, sigma.max())

    def check(self, where: str) -> None:
        if not self.tokens:
            raise ConversionError(f'{self.name} does not run {where}, or reads padding alone')
        if not self.sums.isfinite().all():
            raise ConversionError(f'the input of {self.name} is not finite {where}: no statistics can be taken')

    def nearest(self) -> tuple[Tensor, Tensor]:
        return nearest_affine(self.sums, self.gamma, self.beta, self.precision)

    def error(self, a: Tensor, b: Tensor) -> float:
        return relative_error(self.sums, self.gamma, self.beta, a, b)

    def error_of(self, norm: OfflineNorm) -> float:
        """The error of an offline norm as it is stored, in the dtype of its parameters."""
        scale, shift = norm.affine()
        if not (scale.isfinite().all() and shift.isfinite().all()):
            raise ConversionError(f'{self.name}: the scale or shift that replaces it is beyond {norm.weight.dtype}; '
                                  'convert the model in float32')
        return self.error(scale, shift)

    def spread(self) -> dict[str, float]:
        """Statistics of the tokens' deviations, for :class:`ConvertedNorm`."""
        mean, square = self.sigma / self.sums[0, 0]
        cv2 = max(0., (square / mean.square() - 1).item())
        return dict(cv=cv2**0.5, least_scalar=cv2 / (1 + cv2), largest=(self.largest / mean).item())


def _measure_all(model: nn.Module, batches: list, seen: dict[nn.Module, _Seen],
                 bar: tqdm) -> dict[nn.Module, _Seen]:
    """What each norm, or the module in its place, reads; `seen` are empty ones, by these modules.

    The result is by norm, in the order in which they run; those that do not run come last.
    """
    ran: dict[nn.Module, _Seen] = {}

    def hook(batch, module, args, kwargs, output):
        one = ran.setdefault(module, seen[module])
        if module is one.norm:
            one.examine(args, kwargs, output)
        if not one.obstacle:
            one.add(args, kwargs, batch)

    modules = [module for module, one in seen.items() if len(one.norm.normalized_shape) == 1]
    for batch, inputs in enumerate(batches):
        with watched(modules, partial(hook, batch)):
            run_checked(model, inputs)
        bar.update()
    return {one.norm: one for one in [*ran.values(), *seen.values()]}


def _measure(model: nn.Module, batches: list, norm: nn.Module, before: _Seen, left: set[nn.Module], replay: Replay,
             bar: tqdm) -> _Seen:
    """What one norm reads after the converted ones; `left` are the others, with this one."""
    seen = before.again()

    def hook(module, args, kwargs, output):
        replay.freeze()
        if module is norm:
            seen.add(args, kwargs, batch)
            if seen.calls[batch] == before.calls[batch]:
                raise _Enough

    with watched(left, hook):
        for batch, inputs in enumerate(batches):
            replay.start(batch)
            with suppress(_Enough):
                _run(model, inputs)
            bar.update()
    seen.check('after the norms that are converted')
    return seen


def _takes(model: nn.Module, batch) -> bool:
    """Whether a model runs on a batch."""
    try:
        _run(model, batch)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return True


def run_checked(model: nn.Module, batch) -> None:
    """`_run`, with an error that says what a batch is: images one by one, or arrays, are likely mistakes."""
    inputs = _inputs(batch)
    if not isinstance(inputs, (Tensor, Mapping)):
        raise ConversionError(f'batches: a batch must be a tensor or a Mapping, got {type(inputs).__name__}')
    try:
        _run(model, batch)
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, ConversionError) or not isinstance(inputs, Tensor) or inputs.dim() != 3:
            raise
        raise ConversionError(f'batches: {type(model).__name__} does not take a tensor of {tuple(inputs.shape)}; if it '
                              f'is one image, stack images to batches of (N, C, H, W): {error_text(error)}') from error


def _run(model: nn.Module, batch) -> None:
    """One forward pass, on a copy: the model may write to its inputs. Its output is not needed."""
    device, batch = next(model.parameters()).device, _inputs(batch)
    if not isinstance(batch, Mapping):
        model(batch.to(device, copy=True))
    elif hasattr(model, 'data_preprocessor'):  # mmengine's BaseModel
        model(**model.data_preprocessor(batch, False), mode='tensor')
    else:
        model(**{key: value.to(device, copy=True) if isinstance(value, Tensor) else value
                 for key, value in batch.items()})


def _inputs(batch):
    """The input of the model: the first entry of a tuple or list."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def _num_samples(batch) -> int:
    """Number of samples in a batch; 0 if unknown."""
    inputs = _inputs(batch)
    return len(inputs.get('inputs', ()) if isinstance(inputs, Mapping) else inputs)
