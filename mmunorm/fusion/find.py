"""Step 1 of folding: finds where each norm of a model goes, by rules and by what ran on an example."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from .graph.place import Places
from .plan import FoldPlan
from .report import Fold, Site
from .rules import After, Averages, Chain, Emits, Fact, Into, Reads, Stays, Stream, Unties, join

# A model of these calls its parts as its classes say; its own classes between two rules are part of it.
_PACKAGES = ('mmcv', 'mmdet', 'mmengine', 'mmpretrain', 'mmseg', 'mmunorm', 'timm')


def find(plan: FoldPlan, places: Places | None = None) -> list[Fold]:
    """Where each norm of a model goes, in the order of its modules; what forbids it is not checked yet.

    Without an example, of which `places` are, rules say it, inside of modules whose callers are known. With one, what
    ran decides: a rule counts where the same layers have read the norm.
    """
    claims = _Rules(plan).claims()
    return [_decided(name, claims[name], plan, places) for name in plan.norms]


def by_rules(plan: FoldPlan) -> dict[str, Fold]:
    """What the rules say about each norm by name, whoever calls the model."""
    claims = _Rules(plan).claims()
    return {name: _claimed(name, claims[name], plan) for name in plan.norms}


def _claimed(name: str, claims: list[Fold], plan: FoldPlan) -> Fold:
    fold = claims[0] if claims else Fold(name)
    fold.kind, fold.claims = type(plan.norms[name]).__name__, len(claims)
    return fold


def _decided(name: str, claims: list[Fold], plan: FoldPlan, places: Places | None) -> Fold:
    fold = _claimed(name, claims, plan)
    if name not in plan.affines:
        fold.obstacle = plan.obstacles[name]
    elif places is None:
        fold.obstacle = fold.obstacle or _unknown_caller(name, plan)
    elif not places.confirm(fold, plan):
        sites, why = places.of(name)
        fold = Fold(name, fold.kind, sites, obstacle=why)
    return fold


def _unknown_caller(name: str, plan: FoldPlan) -> str:
    """Why rules do not hold for a norm: it is in a class that nobody knows, which may read it in another way."""
    parts = name.split('.')
    for i in range(len(parts)):
        prefix = '.'.join(parts[:i])
        if plan.facts[prefix] is None and not _is_of_a_package(plan.modules[prefix]):
            kind = type(plan.modules[prefix]).__name__
            return (f'no fold rule knows {kind}, which may use it in another way; '
                    'give fuse_norms an example=, and what runs decides')
    return ''


def _is_of_a_package(module: nn.Module) -> bool:
    name = type(module).__module__
    if name.startswith('torch.'):  # containers and wrappers, some of which have a forward of their own
        return not name.startswith('torch.fx.')
    return name.partition('.')[0] in _PACKAGES and 'forward' not in vars(module)


class _Rules:
    """What the rules say about a model, with full names."""

    def __init__(self, plan: FoldPlan):
        self._plan = plan
        tied = [join(name, fact.layer) for name, fact in plan.said(Unties)]
        self._untied = {layer for layer in tied if plan.owners.others(layer, plan.modules[layer])}

    def claims(self) -> dict[str, list[Fold]]:
        """What is said about each norm, once for each rule that says something."""
        claims = defaultdict(list)
        for name, fact in self._plan.said(Fact):
            for fold in self._folds(name, fact):
                claims[fold.norm].append(fold)
        for name, fact in self._plan.said(Emits):  # of the whole model: what reads it is not known
            norm = join(name, fact.norm)
            claims[norm] = claims[norm] or [Fold(norm)]
        for name, fact in self._plan.said(Stream):
            stream = fact.within(name)
            for station in stream.stations:
                for fold in claims[station.norm]:
                    fold.stream = None if fold.obstacle else stream
        return claims

    def _of(self, kind, name: str) -> list[Fact]:
        return [fact for fact in self._plan.facts.get(name) or () if isinstance(fact, kind)]

    def _folds(self, prefix: str, fact: Fact) -> Iterator[Fold]:
        """The norms that one fact places."""
        if isinstance(fact, Into):
            fold = Fold(join(prefix, fact.norm), pads=[(prefix, fact.pad)] if fact.pad else [])
            for reader in fact.readers:
                self._read(fold, join(prefix, reader), identity=fact.identity, is_padded=fact.pad is not None)
            yield fold
        elif isinstance(fact, After):
            yield Fold(join(prefix, fact.norm), sites=[Site(join(prefix, fact.source), after=True)])
        elif isinstance(fact, Stays):
            yield Fold(join(prefix, fact.norm), obstacle=fact.why)
        elif isinstance(fact, Stream):
            stations = fact.within(prefix).stations
            for station, reader in zip(stations, stations[1:], strict=False):
                fold = Fold(station.norm)
                self._read(fold, reader.part)
                yield fold
            if fact.ends:  # else the last norm is an output
                yield Fold(stations[-1].norm)
        elif isinstance(fact, Chain):
            yield from self._chained([join(prefix, part) for part in fact.parts])

    def _chained(self, parts: list[str]) -> Iterator[Fold]:
        """The norms at the outputs of each part, with what reads them in the parts after it."""
        for i, part in enumerate(parts):
            for emitted in self._of(Emits, part):
                fold = Fold(join(part, emitted.norm), through=[part])
                for name in parts[i + 1:]:
                    if not self._of(Averages, name):
                        self._read(fold, name, emitted.level)
                        break
                    fold.through.append(name)
                yield fold

    def _read(self, fold: Fold, name: str, level: int = -1, identity: bool = False, is_padded: bool = False) -> None:
        """Adds the layers that read input `level` of module `name`: itself, if no rule says more."""
        reads = [fact for fact in self._of(Reads, name) if identity or not fact.adds_input]
        if reads:
            fold.through.append(name)
        else:
            fold.sites.append(Site(name))
            fold.untied += [name] if name in self._untied else []
            fold.unpadded += [] if is_padded else [name]
        for fact in reads:
            if fact.level == level:
                fold.pads += [(name, fact.pad)] if fact.pad else []
                for reader in fact.readers:
                    self._read(fold, join(name, reader), is_padded=is_padded or fact.pad is not None)
