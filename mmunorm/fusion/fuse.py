"""The one verb: fold every norm of a model away that can be, and say where each went (Algorithm 1)."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..compat import forget_compiled_code
from ..init import undo_ntk
from ..norms.layers import is_norm
from ..residuals import Residual
from .algebra import (
    FoldedNorm,
    FoldedNormAct,
    absorb_before,
    absorb_behind,
    affine_of,
    call_obstacle,
    has_act,
    is_layer,
    norm_obstacle,
    num_channels,
    reader_obstacle,
    source_obstacle,
)
from .graph import Site, add_to_state, fold_into, look
from .padding import zero_token
from .registry import (
    Averages,
    Behind,
    Chain,
    Emits,
    Fact,
    Into,
    Pad,
    Reads,
    Stays,
    Stream,
    Unties,
    check_names,
    facts,
)
from .streams import fold_scales, fold_stream, leave, stream_obstacle


@dataclass
class Fold:
    """One norm: where it goes, or why it stays. Every name is the full one."""
    norm: str
    kind: str  # class of the norm
    readers: list[str] = field(default_factory=list)
    source: str = ''
    through: list[str] = field(default_factory=list)  # modules that pass its output on to the readers
    pads: list[tuple[str, Pad]] = field(default_factory=list)
    obstacle: str = ''
    stream: Stream | None = None  # that the norm stands in, with full names
    untied: list[str] = field(default_factory=list)  # readers that get a weight of their own
    sites: tuple[Site, ...] = ()  # the layers beside it by the model's graph, where no rule knows them
    known: bool = True  # whether rules say what reads the norm or is in front of it
    beyond_float16: bool = False  # whether its padding token is too large for float16

    @property
    def where(self) -> str:
        """Where the norm went, or why it stays."""
        if self.obstacle:
            return self.obstacle
        if self.sites:
            layers = dict.fromkeys(site.layer for site in self.sites)
            return ('behind ' if self.sites[0].behind else '') + ', '.join(layers)
        if self.source:
            return f'behind {self.source}'
        if self.stream is not None and not self.readers:
            return ', '.join(self.stream.ends)
        filled = ' (padding filled, too large for float16)' if self.beyond_float16 else ' (padding filled)'
        note = filled if self.pads else ' (with a copy of its shared weight)' if self.untied else ''
        return ', '.join(self.readers) + note


@dataclass(frozen=True)
class FusionReport:
    """What :func:`fuse_norms` did; `str()` gives a table.

    Attributes:
        folded: the norms that are gone; `norm` is a name, `where` tells where it went.
        kept: the norms that are left; `where` tells why.
    """
    folded: tuple[Fold, ...]
    kept: tuple[Fold, ...]

    def __str__(self) -> str:
        lines = [f'{len(self.folded)} of {len(self.folded) + len(self.kept)} norms folded']
        if beyond := sum(fold.beyond_float16 for fold in self.folded):
            lines[0] += f', {beyond} of them with padding too large for float16: there, call half() before fuse_norms()'
        for title, folds in (('folded', self.folded), ('kept', self.kept)):
            if folds:
                width = max(len(fold.norm) for fold in folds)
                kind = max(len(fold.kind) for fold in folds)
                lines += ['', f'{title}:']
                lines += [f'  {fold.norm:{width}}  {fold.kind:{kind}}  {fold.where}' for fold in folds]
        return '\n'.join(lines)


class NotFoldedError(ValueError):
    """Norms cannot be folded, and all had to be."""


def fuse_norms(model: nn.Module, strict: bool = False, example=None) -> FusionReport:
    """Folds every offline norm of `model` into its neighbour, in place (Algorithm 1).

    The folded model computes the same function without any normalization, for every input size. Offline
    norms are mmunorm's and all others with `affine()`, and torch's BatchNorm. Where they go is told by the
    rules of :func:`mmunorm.fusion.fold_rule`, and where no rule knows a block by the model's graph on `example`.
    What cannot be folded exactly is left as it is. Folding a folded model changes nothing. Linear layers in the NTK
    parametrization become plain ones, and the factors of residual schemes go into the layers beside them.

    What is read out of the middle of a folded model, such as a classifier's features before its head, lacks
    the norm that has gone into the next layer.

    Args:
        model (nn.Module): in eval mode; whole, if its last norms are to go into its head or neck.
        strict (bool): make it an error if any norm stays. Defaults to False.
        example: what goes into the model: a tensor, a tuple of arguments, a dict of keyword arguments, or a list of
            such. A copy of the model runs on each, and on a tensor of pictures `(N, C, H, W)` or tokens `(N, L, C)`
            also in other sizes if it takes these. What is folded by them alone is right for the way that they take
            through the model: give one for each. Defaults to None: rules alone.

    Returns:
        FusionReport: each norm, where it went, or why it stays.

    Raises:
        ValueError: `model` or a part of it is in training mode.
        TypeError: `example` is of another kind.
        RuntimeError: the model does not run on `example`.
        NameError: a fold rule names a class that does not exist.
        NotFoldedError: `strict` is set and a norm stays; lists all of them. `model` is unchanged.
    """
    for name, module in model.named_modules():
        # Without torch.compile's wrapper: in 2.4 its own flag stays, whatever `eval()` says.
        if module.training and '_orig_mod' not in module._modules:
            raise ValueError(f"model: {name or 'it'} is in training mode; call model.eval() first")
    folds = plan(model, example)
    report = FusionReport(tuple(fold for fold in folds if not fold.obstacle),
                          tuple(fold for fold in folds if fold.obstacle))
    if strict and report.kept:
        listed = '\n'.join(f'  {fold.norm} ({fold.kind}): {fold.where}' for fold in report.kept)
        raise NotFoldedError(f'strict=True, and {len(report.kept)} norms cannot be folded:\n{listed}')
    undo_ntk(model)
    affines = {fold.norm: affine_of(model.get_submodule(fold.norm)) for fold in report.folded}
    for stream in _streams(report.folded):
        affines.update(fold_stream(model, stream))
    for fold in report.folded:
        _apply(model, fold, *affines[fold.norm])
    fold_scales(model, _Owners(model).others)
    forget_compiled_code()
    return report


def fold_structure(model: nn.Module, names: Iterable[str], made: Mapping[str, Sequence[str]] | None = None) -> None:
    """Gives `model` the structure of a folded one, for folded weights to be loaded into, in place.

    Args:
        model (nn.Module): of any weights, statistics and norms: they are lost.
        names: full names of the norms that are folded.
        made: of those that were folded by the model's graph, the tensors that came into its state by that.

    Raises:
        ValueError: `model` has no such norm, or no fold rule covers its place.
    """
    folds = {fold.norm: fold for fold in plan(model)}
    modules = dict(model.named_modules())
    made = made or {}
    undo_ntk(model)
    for name in names:
        if isinstance(modules.get(name), Residual):
            leave(model, name)
            continue
        if name in made and name in folds:
            for tensor in made[name]:
                add_to_state(model, tensor)
            _leave(model, name, tuple(made[name]))
            continue
        fold = folds.get(name)
        layers = [] if fold is None else [fold.source] if fold.source else fold.readers
        if not layers and (fold is None or fold.stream is None):
            raise ValueError(f'{type(model).__name__} has no norm {name} to fold, which the checkpoint has '
                             'folded: it is of another architecture')
        channels = num_channels(model.get_submodule(layers[0]), behind=bool(fold.source)) if layers else 0
        ones = torch.ones(channels, dtype=torch.float64)
        _apply(model, fold, ones, torch.zeros_like(ones))
    for stream in _streams(folds[name] for name in names if name in folds):
        scale, shift = affine_of(modules[stream.stations[0].norm])
        for name, pad in stream.pads:
            pad(model.get_submodule(name), zero_token(torch.ones_like(scale), torch.zeros_like(shift)))


def plan(model: nn.Module, example=None) -> list[Fold]:
    """What :func:`fuse_norms` would do with each norm of `model`, in the order of its modules."""
    check_names()
    names = [name for name, module in model.named_modules(remove_duplicate=False) if is_norm(module)]
    modules = dict(model.named_modules(remove_duplicate=False))
    claims = defaultdict(list)
    emitted = set()
    for name, module in model.named_modules():
        emitted |= {_join(name, fact.norm) for fact in _of(Emits, module)}
        for fold in _folds_of(module, name, modules):
            if fold.norm in names:
                claims[fold.norm].append(fold)
    # An output of the whole model: what reads it is not known.
    for name in emitted & set(names) - set(claims):
        claims[name].append(Fold(name, ''))
    kinds = {name: type(modules[name]).__name__ for name in names}
    folds = [claims[name][0] if claims[name] else Fold(name, kinds[name]) for name in names]
    streams = {}
    for name, module in model.named_modules():
        for fact in _of(Stream, module):
            stream = fact.within(name)
            streams.update({station.norm: stream for station in stream.stations})
    for fold in folds:
        fold.stream = None if fold.obstacle else streams.get(fold.norm)
    owners = _Owners(model)
    untied = {_join(name, fact.layer) for name, module in model.named_modules() for fact in _of(Unties, module)}
    readers = Counter(layer for fold in folds for layer in {*fold.readers, fold.source} - {''})
    for fold in folds:
        fold.kind = kinds[fold.norm]
        fold.untied = [layer for layer in fold.readers if layer in untied and owners.others(layer, modules[layer])]
        fold.known = bool(fold.obstacle or fold.source or fold.stream or fold.readers and all(
            is_layer(modules[reader]) for reader in fold.readers if reader in modules))
        if not fold.obstacle:
            fold.obstacle = _obstacle(fold, len(claims[fold.norm]), modules, owners, readers)
    _refuse_streams(model, folds, owners)
    if example is not None:
        _look_at_graph(model, folds, example, modules, owners)
    return folds


def _look_at_graph(model: nn.Module, folds: list[Fold], example, modules: dict[str, nn.Module],
                   owners: _Owners) -> None:
    """Places the norms that no rule knows."""
    unknown = [fold for fold in folds if not fold.known and not norm_obstacle(modules[fold.norm], allow_act=True)
               and not owners.others(fold.norm, modules[fold.norm])]
    if not unknown:
        return
    places = look(model, example)
    # By rules: what is in front of these layers, and what is behind these.
    before = {reader for fold in folds if not fold.obstacle for reader in fold.readers}
    behind = {fold.source for fold in folds if not fold.obstacle} | {
        station.last for stream in _streams(folds) for station in stream.stations}
    for fold in unknown:
        place = places[fold.norm]
        fold.obstacle, fold.sites = place.why, place.sites
        for site in place.sites:
            layer = modules[site.layer]
            if shared := owners.others(site.layer, layer):
                fold.obstacle = f'its neighbour {site.layer} is shared with {shared}'
            elif site.layer in (behind if site.behind else before):
                fold.obstacle = f'its neighbour {site.layer} has two norms beside it'
        if fold.obstacle:
            fold.sites = ()


def _streams(folds: Iterable[Fold]) -> list[Stream]:
    """The streams that norms stand in, in order."""
    return list(dict.fromkeys(fold.stream for fold in folds if fold.stream is not None))


def _refuse_streams(model: nn.Module, folds: list[Fold], owners: _Owners) -> None:
    """Lets all norms of a stream stay where one of them has to, or the stream cannot be carried to its end."""
    by_norm = {fold.norm: fold for fold in folds}
    for stream in _streams(folds):
        in_stream = [by_norm[station.norm] for station in stream.stations if station.norm in by_norm]
        beside = [by_norm[end] for end in stream.ends if end in by_norm]
        stays = next((fold for fold in (*in_stream, *beside) if fold.obstacle), None)
        if len(in_stream) + len(beside) < len(stream.stations) + len(stream.ends):
            reason = 'norms of the stream it stands in are folded already'
        elif stays is not None:
            reason = f'the stream it stands in cannot be carried past {stays.norm}: {stays.obstacle}'
        else:
            reason = stream_obstacle(model, stream, owners.others)
        if reason:
            for fold in in_stream:
                fold.obstacle = fold.obstacle or reason


def _join(prefix: str, name: str) -> str:
    return '.'.join(filter(None, (prefix, name)))


def _folds_of(module: nn.Module, prefix: str, modules: dict[str, nn.Module]) -> Iterator[Fold]:
    """The claims of one module's rule, with full names."""
    for fact in facts(module):
        if isinstance(fact, Into):
            fold = Fold(_join(prefix, fact.norm), '')
            _add_pad(fold, prefix, fact.pad)
            for reader in fact.readers:
                _add_readers(fold, _join(prefix, reader), modules, identity=fact.identity)
            yield fold
        elif isinstance(fact, Behind):
            yield Fold(_join(prefix, fact.norm), '', source=_join(prefix, fact.source))
        elif isinstance(fact, Stays):
            yield Fold(_join(prefix, fact.norm), '', obstacle=fact.why)
        elif isinstance(fact, Stream):
            yield from _folds_of_stream(fact.within(prefix), modules)
        elif isinstance(fact, Chain):
            yield from _folds_of_chain([_join(prefix, part) for part in fact.parts], modules)


def _folds_of_stream(stream: Stream, modules: dict[str, nn.Module]) -> Iterator[Fold]:
    """The norms of a stream with what reads them in it; not the last, where that is an output."""
    for station in stream.stations if stream.ends else stream.stations[:-1]:
        fold = Fold(station.norm, '')
        for reader in station.readers:
            _add_readers(fold, reader, modules)
        yield fold


def _folds_of_chain(parts: list[str], modules: dict[str, nn.Module]) -> Iterator[Fold]:
    """The norms at the outputs of each part, with what reads them in the part behind it."""
    for i, part in enumerate(parts):
        for emitted in _of(Emits, modules.get(part)):
            fold = Fold(_join(part, emitted.norm), '')
            fold.through.append(part)
            for name in parts[i + 1:]:
                if not list(_of(Averages, modules.get(name))):
                    _add_readers(fold, name, modules, emitted.level)
                    break
                fold.through.append(name)
            yield fold


def _of(kind: type[Fact], module: nn.Module | None) -> Iterator[Fact]:
    return (fact for fact in (facts(module) if module is not None else ()) if isinstance(fact, kind))


def _add_pad(fold: Fold, name: str, pad: Pad | None) -> None:
    if pad is not None:
        fold.pads.append((name, pad))


def _add_readers(fold: Fold, name: str, modules: dict[str, nn.Module], level: int = -1,
                 identity: bool = False) -> None:
    """Adds the layers that read input `level` of module `name`: itself, if no rule says more."""
    reads = [fact for fact in _of(Reads, modules.get(name)) if identity or not fact.adds_input]
    (fold.through if reads else fold.readers).append(name)
    for fact in reads:
        if fact.level == level:
            _add_pad(fold, name, fact.pad)
            for reader in fact.readers:
                _add_readers(fold, _join(name, reader), modules)


def _obstacle(fold: Fold, num_claims: int, modules: dict[str, nn.Module], owners: _Owners,
              num_uses: Counter) -> str:
    """Why a norm must stay, half a sentence, or ''."""
    norm = modules[fold.norm]
    if obstacle := norm_obstacle(norm):
        return obstacle
    if shared := owners.others(fold.norm, norm):
        return f'is shared with {shared}'
    if num_claims == 0:
        return 'no fold rule covers its place'
    if num_claims > 1:
        return 'several fold rules cover its place'
    layers = [fold.source] if fold.source else fold.readers
    if not layers and not (fold.stream is not None and fold.stream.ends):
        return 'nothing in this model reads it'
    for name in fold.through:
        if obstacle := call_obstacle(modules[name]):
            return f'its output passes through {name}, which {obstacle}'
    scale, shift = affine_of(norm)
    for layer in layers:
        if layer not in modules:
            return f'its neighbour {layer} does not exist'
        check = source_obstacle if fold.source else reader_obstacle
        if obstacle := check(modules[layer], shift.numel()):
            return f'its neighbour {layer} {obstacle}'
        if scale.dim() > 1 and (fold.source or getattr(modules[layer], 'groups', 1) > 1):
            return f'it mixes channels, which its neighbour {layer} cannot take up'
        if layer not in fold.untied and (shared := owners.others(layer, modules[layer])):
            return f'its neighbour {layer} is shared with {shared}'
        if num_uses[layer] > 1:
            return f'its neighbour {layer} has two norms beside it'
    if fold.pads and (len(fold.pads) > 1 or len(layers) > 1):
        return 'zeros are padded in between it and several readers'
    if scale.dim() > 1 and (fold.pads or fold.stream is not None):
        return 'it mixes channels, and what it reads is padded with zeros, or carried in a stream'
    # A stream looks itself whether it can be carried.
    dtype = modules[layers[0]].weight.dtype if layers else None
    if fold.pads and fold.stream is None and not zero_token(scale, shift).fits(dtype):
        return f'{str(dtype).removeprefix("torch.")} cannot hold the token that stands for zero padding behind it'
    return ''


class _Owners:
    """Who else holds a module, or the memory of its parameters."""

    def __init__(self, model: nn.Module):
        self._names = defaultdict(list)
        for name, module in model.named_modules(remove_duplicate=False):
            self._names[id(module)].append(name)
        self._memory = [(name, *_span(parameter))
                        for name, parameter in model.named_parameters(remove_duplicate=False)]

    def others(self, name: str, module: nn.Module) -> str:
        """Another name of the module or of one of its parameters in the model, or ''."""
        if others := [alias for alias in self._names[id(module)] if alias != name]:
            return others[0]
        own = {_join(name, parameter) for parameter, _ in module.named_parameters()}
        for start, end in map(_span, module.parameters()):
            for alias, other_start, other_end in self._memory:
                if alias not in own and other_start < end and start < other_end:
                    return alias
        return ''


def _span(parameter: torch.Tensor) -> tuple[int, int]:
    start = parameter.data_ptr() or id(parameter)
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return start, start + (last + 1) * parameter.element_size()


def _apply(model: nn.Module, fold: Fold, scale: torch.Tensor, shift: torch.Tensor) -> None:
    made = ()
    if fold.sites:
        made = fold_into(model, fold.sites, scale, shift)
    elif fold.source:
        absorb_behind(model.get_submodule(fold.source), scale, shift)
    else:
        fill = zero_token(scale, shift) if fold.pads else None
        fold.beyond_float16 = fill is not None and not fill.fits(torch.float16)
        for name in fold.untied:
            layer = model.get_submodule(name)
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
        for reader in fold.readers:
            absorb_before(model.get_submodule(reader), scale, shift, fill)
        for name, pad in fold.pads:
            pad(model.get_submodule(name), fill)
    _leave(model, fold.norm, made if fold.sites else None)


def _leave(model: nn.Module, name: str, made: Sequence[str] | None) -> None:
    """Puts a :class:`FoldedNorm` where the norm `name` stands."""
    norm = model.get_submodule(name)
    device = next((tensor.device for tensor in (*norm.parameters(), *norm.buffers(), *model.parameters())), None)
    folded = FoldedNormAct(made, norm) if has_act(norm) else FoldedNorm(made)
    parent, _, child = name.rpartition('.')
    setattr(model.get_submodule(parent), child, folded.eval().to(device))
