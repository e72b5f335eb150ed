"""Converts the LayerNorms of a trained model to offline norms, without training."""
from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..fusion.norms import affine_of
from ..modules import disable_fast_path, eval_mode, refuse_save_pretrained, set_submodules
from ..norms import OfflineNorm
from ..norms.base import DEFAULT_NORM_CFG, check_norm_cfg
from ..norms.layers import channel_axis, input_of, is_channels_first
from ..norms.replace import NOT_SAVED, build_like, check_replaceable, eps_of, is_rms, layer_norms, with_fused_parts
from ..registry import MODELS
from ..utils import check_module
from .calls import ExternalReaders, hooked
from .images import all_batches, image_warnings, num_samples
from .report import ConversionError, ConversionReport, ConvertedNorm
from .statistics import NUM_SUMS, deviations, nearest_affine, relative_error, token_sums, tokens_of, valid_tokens

TOLERANCE = 0.02  # how far the output of a LayerNorm may be from the formula, as a share of its size; bfloat16 rounds
SWEEPS = 2  # passes over the batches that fit the norms
GROUPS = 32  # of batches, at most: parts of the sums that the second sweep replaces


@torch.inference_mode(False)  # parameters made inside it cannot be trained
@torch.no_grad()
def convert_norms(model: nn.Module, batches, norm_cfg: dict = DEFAULT_NORM_CFG, keep: Sequence[str] = (),
                  progress: bool = False) -> ConversionReport:
    """Replaces every LayerNorm and RMSNorm of a trained model by the nearest offline norm, in place.

    An offline norm is a map `a * x + b` for each channel. It is fitted to LayerNorm by least squares over the tokens
    of `batches`:

        a = gamma * Cov(x, u) / Var(x)      b = beta + gamma * E[u] - a * E[x]      u = (x - mu) / sigma

    Each norm is fitted to its inputs from the converted layers before it: at every call, it is first fitted to all of
    its inputs so far. A second sweep over the batches replaces the inputs of the first, step by step. One pass before
    checks the LayerNorms, and one after measures the errors: four forward passes over all batches. A norm that runs
    several times is fitted over all its runs. Only the norms' weights change.

    Args:
        model (nn.Module): a trained model of any library, with LayerNorms or RMSNorms over the channels of `(..., C)`
            or `(N, C, H, W)`. For RMSNorm, `mu = 0` and the mean square replaces the variance.
        batches: a few hundred training images, without augmentation, which are held in memory: batches, or a shuffled
            DataLoader, of which the first 512 samples are used. A tensor or Mapping is one batch. In an Iterable, a
            batch is a tensor; a tuple or list, whose first entry is the input; or a Mapping, as from OpenMMLab's data
            loaders, or of keyword arguments for other models. Tensors are moved to the model's device.
        norm_cfg (dict): config of the new norms: UN, MABN, TokenBN, RepBN, or PN without `layer_scale`. `eta` starts
            at 0. Defaults to `dict(type='UN')`.
        keep (Sequence[str]): full names of LayerNorms to keep, or of modules whose LayerNorms are kept.
        progress (bool): show a progress bar. Defaults to False.

    Returns:
        ConversionReport: the error of each norm, and what is suspicious about the images. A LayerNorm is kept, with a
            reason in the report, if it did not run, if it is a subclass with another formula (other than 1 + gamma for
            gamma), if it is called with arguments other than its input and a pad mask, or if its weight or bias is read
            outside of its calls.

    Raises:
        TypeError: `model` is no module, or `norm_cfg` is not a dict with a `type` or has an unknown argument.
        KeyError: no norm of this type is registered.
        ConversionError: a ValueError: `norm_cfg` is not an offline norm, `model` has no LayerNorm that can be
            converted or one that cannot be replaced, an entry of `keep` matches nothing, there are no batches, or
            activations are not finite. After any error, `model` is unchanged.
    """
    check_module(model)
    check_norm_cfg(norm_cfg)
    names = layer_norms(model)
    if not names or '' in names:
        what = 'is itself a LayerNorm, not a model with some' if names else 'has no LayerNorm or RMSNorm'
        raise ConversionError(f'model: {type(model).__name__} {what}')
    kept = dict.fromkeys(_norms_inside(names, keep), 'requested')
    wanted = {name: norm for name, norm in names.items() if norm not in kept}
    if not wanted:
        raise ConversionError(f'keep={list(keep)!r} keeps all LayerNorms')
    try:
        check_replaceable(wanted)
    except ValueError as error:
        raise ConversionError(f'{error}; `keep` lets it stay') from error
    targets = {norm: build_target(norm_cfg, norm, model) for norm in wanted.values()}
    return _convert_all(model, batches, names, targets, kept, progress)


def _norms_inside(names: dict[str, nn.Module], keep: Sequence[str]) -> Iterator[nn.Module]:
    """The LayerNorms with these full names, or inside of modules with these names."""
    for entry in keep:
        found = [norm for name, norm in names.items() if f'{name}.'.startswith(f'{entry}.')]
        if not found:
            raise ConversionError(f'keep: no LayerNorm has the name {entry!r} or is inside of a module of this name; '
                                  f'names are such as {next(iter(names))!r}')
        yield from found


def build_target(norm_cfg: dict, norm: nn.Module, model: nn.Module) -> OfflineNorm:
    """The offline norm that replaces a LayerNorm of a model; a ConversionError if that is impossible."""
    kind = norm_cfg['type']
    target = kind if isinstance(kind, type) else MODELS.module_dict.get(kind)
    why = 'is no offline norm over tokens'
    if not isinstance(target, type) or issubclass(target, OfflineNorm):
        try:
            target = build_like(norm_cfg, norm, model)
        except (TypeError, ValueError) as error:
            raise ConversionError(f'norm_cfg={norm_cfg!r}: {error}') from error
        if is_channels_first(norm) or not is_channels_first(target):
            why = target.fold_obstacle
    if why:
        name = getattr(target, '__name__', type(target).__name__)
        raise ConversionError(f'norm_cfg={norm_cfg!r}: {name} {why}; take UN, MABN, TokenBN or RepBN')
    return target


@torch.no_grad()
def convert_loaded(model: nn.Module, batches, progress: bool = False) -> ConversionReport:
    """Fits offline norms in place to the LayerNorms whose weight and bias were loaded into them.

    Offline norms that load a LayerNorm checkpoint have its `weight` and `bias` and no statistics (`lacks_statistics`).
    Each of them, and each norm that loaded nothing, gets the values of :func:`convert_norms` for a LayerNorm with this
    weight and bias. Modules and parameters stay the same objects, so an optimizer remains valid. LayerNorm's `eps` is
    assumed to be that of the norm.

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
    if not any(norm.lacks_statistics for norm in norms.values()):
        raise ConversionError('model: no norm has the scale of a LayerNorm and no statistics')
    for name, norm in norms.items():
        if norm.fold_obstacle:
            raise ConversionError(f'{name}: {type(norm).__name__} {norm.fold_obstacle}')
    teacher = with_layer_norms(model)
    layers = {name: teacher.get_submodule(name) for name in norms}
    report = _convert_all(teacher, batches, layers, {layers[name]: copy.deepcopy(norm) for name, norm in norms.items()},
                          {}, progress)
    for converted in report.converted:
        norms[converted.norm].load_state_dict(teacher.get_submodule(converted.norm).state_dict())
    return report


def norms_to_fit(model: nn.Module) -> dict[str, OfflineNorm]:
    """The norms that :func:`convert_loaded` fits, by full name."""
    return {name: norm for name, norm in model.named_modules(remove_duplicate=False)
            if isinstance(norm, OfflineNorm) and (norm.lacks_statistics or norm.is_fresh)}


@torch.no_grad()
def layer_norm_of(norm: OfflineNorm) -> nn.LayerNorm:
    """The LayerNorm that has the scale and shift of an offline norm."""
    if is_channels_first(norm):
        from mmpretrain.models.utils import LayerNorm2d as cls  # lazy import: optional dependency
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


def _convert_all(model: nn.Module, batches, names: dict[str, nn.Module], targets: dict[nn.Module, OfflineNorm],
                 kept: dict[nn.Module, str], progress: bool) -> ConversionReport:
    """Replaces each LayerNorm by its target, fitted to it; `names` has all LayerNorms, also those `kept`."""
    batches = all_batches(batches)
    if not batches:
        raise ConversionError('batches: there is none to take statistics from')
    replacements = {norm: with_fused_parts(target, norm) for norm, target in targets.items()}
    with eval_mode(model, *replacements.values()), tqdm(total=len(batches) * (2 + SWEEPS), desc='calibrating',
                                                        unit='batch', disable=None if progress else True) as bar:
        changes = disable_fast_path(model, [name for name in names if names[name] in targets])
        try:
            stats = _inspect(model, batches, names, kept, bar)
            targets = {norm: target for norm, target in targets.items() if not stats[norm].obstacle}
            set_submodules(model, {name: replacements[norm] for name, norm in names.items() if norm in targets})
            fitted = {target: stats[norm].empty_copy() for norm, target in targets.items()}
            _fit(model, batches, fitted, bar)
            empty = {target: measured.empty_copy() for target, measured in fitted.items()}
            final = _measure(model, batches, empty, bar)
            errors = {norm: final[norm].error_of(target) for norm, target in targets.items()}
        except BaseException:
            set_submodules(model, names)
            for module, name, value in changes:
                setattr(module, name, value)
            raise
    refuse_save_pretrained(model, lambda part: isinstance(part, OfflineNorm), NOT_SAVED)
    rows = []
    for norm, measured in stats.items():
        columns = {} if measured.obstacle else dict(
            cv=measured.cv(), least=measured.error(*measured.nearest()), error=errors.get(norm))
        rows.append(ConvertedNorm(measured.name, **columns, kept=kept.get(norm) or measured.obstacle))
    return ConversionReport(tuple(rows), sum(map(num_samples, batches)), image_warnings(batches))


def _inspect(model: nn.Module, batches: list, names: Mapping[str, nn.Module], kept: Mapping[nn.Module, str],
             bar: tqdm) -> dict[nn.Module, InputStats]:
    """The statistics of the inputs of all LayerNorms, in the order in which they run, and why one cannot be converted.

    A ConversionError if none can be converted, or the input of one is not finite.
    """
    stats: dict[nn.Module, InputStats] = {}
    for name, norm in names.items():
        stats.setdefault(norm, InputStats(norm, name))
    with ExternalReaders(stats) as readers:
        stats = _measure(model, batches, stats, bar)
    for norm, measured in stats.items():
        if not measured.obstacle and norm in readers.found:
            measured.obstacle = f'has a weight or bias that {readers.found[norm]} reads outside of it'
        if not measured.tokens and not measured.obstacle:
            measured.obstacle = 'did not run on these samples'
    wanted = [measured for norm, measured in stats.items() if norm not in kept]
    if all(measured.obstacle for measured in wanted):
        which = 'its LayerNorm cannot' if len(stats) == 1 else f'none of its {len(stats)} LayerNorms can'
        raise ConversionError(f'model: {which} be converted: {wanted[0].name} {wanted[0].obstacle}')
    for measured in stats.values():
        if not measured.obstacle:
            measured.check('in the model as it is')
    return stats


class InputStats:
    """Statistics of the inputs of one LayerNorm, or of the norm that replaces it."""

    def __init__(self, norm: nn.Module, name: str):
        self.norm, self.name, self.is_centered = norm, name, not is_rms(norm)
        self.gamma, self.beta = affine_of(norm)
        self.sums = torch.zeros(NUM_SUMS, *self.gamma.shape, dtype=torch.float64, device=self.gamma.device)
        self.sigma = self.sums.new_zeros(2)  # sums of sigma and sigma^2
        self.precision = 0.
        self.tokens = 0
        self.obstacle = ''  # why no offline norm can replace the norm

    def empty_copy(self) -> InputStats:
        new = InputStats(self.norm, self.name)
        new.gamma = self.gamma
        return new

    def validate_call(self, args: tuple, kwargs: dict, output) -> None:
        """Notes an obstacle if an offline norm takes no such call, or if the first output is not LayerNorm's."""
        (x, pad_mask), dim = input_of(args, kwargs), channel_axis(self.norm, kwargs)
        shape = x.movedim(dim, -1).shape[:-1]
        is_mask = isinstance(pad_mask, Tensor) and pad_mask.dtype == torch.bool and pad_mask.shape == shape
        if len(args) > 2 or kwargs.keys() - {'x', 'pad_mask', 'data_format'} or not (pad_mask is None or is_mask):
            self.obstacle = 'is called with arguments other than x and pad_mask'
        elif not self.tokens and not self._computes(output, x, pad_mask, dim):
            kind = 'LayerNorm' if self.is_centered else 'RMSNorm'
            self.obstacle = f'is a {type(self.norm).__name__} whose output is not that of {kind} over dimension {dim}'

    def _computes(self, output, x: Tensor, pad_mask: Tensor | None, dim: int) -> bool:
        """Whether `output` is LayerNorm of `x` over dimension `dim`; gamma becomes 1 + gamma if that is its scale."""
        if not isinstance(output, Tensor) or output.shape != x.shape or x.shape[dim] != len(self.gamma):
            return False
        tokens, y = (valid_tokens(tensor.movedim(dim, -1), pad_mask) for tensor in (x, output))
        mean, sigma = deviations(tokens, eps_of(self.norm, x.dtype), self.is_centered)
        for gamma in (self.gamma, 1 + self.gamma):
            expected = (gamma * (tokens - mean) / sigma + self.beta).to(output.dtype)
            for part in self.norm.children():  # an activation
                expected = part(expected)
            if not (expected - y).norm() > TOLERANCE * expected.norm():  # NaN has its own message
                self.gamma = gamma
                return True
        return False

    def add(self, args: tuple, kwargs: dict) -> Tensor:
        """Adds a call of the norm; returns the sums over its tokens."""
        dtype = input_of(args, kwargs)[0].dtype
        tokens, eps = tokens_of(self.norm, args, kwargs), eps_of(self.norm, dtype)
        sums = token_sums(tokens, eps, self.is_centered)
        _, sigma = deviations(tokens, eps, self.is_centered)
        self.sums += sums
        self.sigma += torch.stack([sigma.sum(), sigma.square().sum()])
        self.tokens += len(tokens)
        self.precision = torch.finfo(dtype).eps
        return sums

    def check(self, where: str) -> None:
        if not self.sums[0, 0]:
            raise ConversionError(f'{self.name} does not run {where}, or reads padding alone')
        if not self.sums.isfinite().all():
            raise ConversionError(f'the input of {self.name} is not finite {where}: no statistics can be taken')

    def nearest(self) -> tuple[Tensor, Tensor]:
        return nearest_affine(self.sums, self.gamma, self.beta, self.precision)

    def fit(self, target: OfflineNorm) -> None:
        """Fits an offline norm to the inputs, and gives it their E[x] and E[x^2]."""
        self.check('after the norms that are converted')
        target.set_affine(*self.nearest(), *(self.sums[1:3] / self.sums[0]))

    def error(self, a: Tensor, b: Tensor) -> float:
        return relative_error(self.sums, self.gamma, self.beta, a, b)

    def error_of(self, norm: OfflineNorm) -> float:
        """The error of an offline norm in its dtype; a ConversionError if its scale or shift is beyond that's range."""
        self.check('after the norms that are converted')
        scale, shift = norm.affine()
        if not (scale.isfinite().all() and shift.isfinite().all()):
            raise ConversionError(f'{self.name}: the scale or shift that replaces it is beyond {norm.weight.dtype}; '
                                  'convert the model in float32')
        return self.error(scale, shift)

    def cv(self) -> float:
        """The coefficient of variation of the tokens' deviations."""
        mean, square = self.sigma / self.sums[0, 0]
        return max(0., (square / mean.square() - 1).item())**0.5


def _measure(model: nn.Module, batches: list, stats: dict[nn.Module, InputStats],
             bar: tqdm) -> dict[nn.Module, InputStats]:
    """Adds the inputs of each norm, or of the module that replaces it, to its `stats`, given by these modules.

    The result is by norm, in the order in which they run; those that do not run come last.
    """
    ran: dict[nn.Module, InputStats] = {}

    def hook(module, args, kwargs, output):
        measured = ran.setdefault(module, stats[module])
        if module is measured.norm:
            measured.validate_call(args, kwargs, output)
        if not measured.obstacle:
            measured.add(args, kwargs)

    with hooked([module for module, measured in stats.items() if len(measured.norm.normalized_shape) == 1], hook):
        for batch in batches:
            run(model, batch)
            bar.update()
    return {measured.norm: measured for measured in [*ran.values(), *stats.values()]}


def _fit(model: nn.Module, batches: list, stats: Mapping[OfflineNorm, InputStats], bar: tqdm) -> None:
    """Fits offline norms in the model to LayerNorms; `stats` are still empty, and get the statistics of their inputs.

    At each call, before it runs, a norm is fitted to all of its inputs so far. So the norms after it read almost what
    they will read in the converted model. The second sweep replaces the inputs of one group of batches after the other.
    """
    size = -(-len(batches) // GROUPS)
    groups = [batches[start:start + size] for start in range(0, len(batches), size)]
    sums: list[dict[OfflineNorm, Tensor]] = [{} for _ in groups]

    def hook(target, args, kwargs):
        measured = stats[target]
        sums[index][target] = sums[index].get(target, 0) + measured.add(args, kwargs)
        if measured.sums[0, 0] > 0:
            measured.fit(target)

    with hooked(stats, hook, before=True):
        for _ in range(SWEEPS):
            for index, group in enumerate(groups):
                for target, old in sums[index].items():
                    stats[target].sums -= old
                sums[index] = {}
                for batch in group:
                    run(model, batch)
                    bar.update()
    for target, measured in stats.items():
        measured.sums = sum((group[target] for group in sums if target in group), torch.zeros_like(measured.sums))
        measured.fit(target)


def run(model: nn.Module, batch) -> None:
    """One forward pass, on a copy: the model may write to its inputs."""
    inputs, device = batch[0] if isinstance(batch, (tuple, list)) else batch, next(model.parameters()).device
    if isinstance(inputs, Tensor):
        model(inputs.to(device, copy=True))
    elif not isinstance(inputs, Mapping):
        raise ConversionError(f'batches: a batch must be a tensor or a Mapping, got {type(inputs).__name__}')
    elif hasattr(model, 'data_preprocessor'):  # mmengine's BaseModel
        model(**model.data_preprocessor(inputs, False), mode='tensor')
    else:
        model(**{key: value.to(device, copy=True) if isinstance(value, Tensor) else value
                 for key, value in inputs.items()})
