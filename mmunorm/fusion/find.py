"""Step 1 of folding: finds where each norm of a model goes, by rules and by the model's graph."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from ..norms.layers import is_norm
from .check import Owners, is_layer, norm_obstacle
from .graph.place import look
from .report import Fold, Site
from .rules import Averages, Behind, Chain, Emits, Fact, Into, Reads, Stays, Stream, Unties, facts, join
from .streams import stations_of


def find(model: nn.Module, example=None) -> list[Fold]:
    """Where each norm of a model goes, in the order of its modules: by rules, and by the graph where none knows.

    Nothing is checked yet. Without an example (see :func:`mmunorm.fuse_norms`) the graph is not looked at.
    """
    modules, owners = dict(model.named_modules(remove_duplicate=False)), Owners(model)
    claims = _Rules(model, modules, owners).claims()
    folds = {}
    for name, norm in modules.items():
        if is_norm(norm):
            folds[name] = fold = claims[name][0] if claims[name] else Fold(name)
            fold.kind, fold.claims = type(norm).__name__, len(claims[name])
    unknown = [] if example is None else [
        name for name, fold in folds.items() if not _is_known(fold, modules)
        and not norm_obstacle(modules[name], allow_act=True) and not owners.others(name, modules[name])]
    places = look(model, example) if unknown else {}
    for name in unknown:
        sites, why = places[name]
        folds[name] = Fold(name, folds[name].kind, sites, obstacle=why)
    return list(folds.values())


def _is_known(fold: Fold, modules: dict[str, nn.Module]) -> bool:
    """Whether rules say which layers take a norm up, or that none can."""
    return bool(fold.obstacle or fold.stream or fold.sites and all(
        site.after or site.layer not in modules or is_layer(modules[site.layer]) for site in fold.sites))


class _Rules:
    """What the rules say about a model, with full names."""

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], owners: Owners):
        self._facts = {name: facts(module) for name, module in modules.items()}
        self._first = [name for name, _ in model.named_modules()]  # each module by one name
        streams = [fact.within(name) for name, fact in self._all(Stream)]
        self._stations = {stream: stations_of(modules[stream.layers], stream.layers) for stream in streams}
        tied = [join(name, fact.layer) for name, fact in self._all(Unties)]
        self._untied = {layer for layer in tied if owners.others(layer, modules[layer])}

    def claims(self) -> dict[str, list[Fold]]:
        """What is said about each norm, once for each rule that says something."""
        claims = defaultdict(list)
        for name, fact in self._all(Fact):
            for fold in self._folds(name, fact):
                claims[fold.norm].append(fold)
        for name, fact in self._all(Emits):  # of the whole model: what reads it is not known
            norm = join(name, fact.norm)
            claims[norm] = claims[norm] or [Fold(norm)]
        for stream, stations in self._stations.items():
            for station in stations:
                for fold in claims[station.norm]:
                    fold.stream = None if fold.obstacle else stream
        return claims

    def _all(self, kind) -> Iterator[tuple[str, Fact]]:
        return ((name, fact) for name in self._first for fact in self._of(kind, name))

    def _of(self, kind, name: str) -> list[Fact]:
        return [fact for fact in self._facts.get(name, ()) if isinstance(fact, kind)]

    def _folds(self, prefix: str, fact: Fact) -> Iterator[Fold]:
        """The norms that one fact places."""
        if isinstance(fact, Into):
            fold = Fold(join(prefix, fact.norm), pads=[(prefix, fact.pad)] if fact.pad else [])
            for reader in fact.readers:
                self._read(fold, join(prefix, reader), identity=fact.identity)
            yield fold
        elif isinstance(fact, Behind):
            yield Fold(join(prefix, fact.norm), sites=[Site(join(prefix, fact.source), after=True)])
        elif isinstance(fact, Stays):
            yield Fold(join(prefix, fact.norm), obstacle=fact.why)
        elif isinstance(fact, Stream):
            stations = self._stations[fact.within(prefix)]
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

    def _read(self, fold: Fold, name: str, level: int = -1, identity: bool = False) -> None:
        """Adds the layers that read input `level` of module `name`: itself, if no rule says more."""
        reads = [fact for fact in self._of(Reads, name) if identity or not fact.adds_input]
        if reads:
            fold.through.append(name)
        else:
            fold.sites.append(Site(name))
            fold.untied += [name] if name in self._untied else []
        for fact in reads:
            if fact.level == level:
                fold.pads += [(name, fact.pad)] if fact.pad else []
                for reader in fact.readers:
                    self._read(fold, join(name, reader))
