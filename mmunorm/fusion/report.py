"""Where each norm of a model goes, or why it stays."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .rules import Pad, Stream


@dataclass(frozen=True)
class Site:
    """A layer that takes a norm up: one that reads the norm, or with `after` one whose output the norm reads."""
    layer: str  # full name of the module that holds the weight
    after: bool = False
    weight: str = 'weight'  # its name in that module
    rows: tuple[int, int] | None = None  # the first of its rows that are the layer's, and the end; None for all
    # For each channel that the layer reads (`after`: gives), the norm's channel there, or -1; None for the same ones.
    channels: tuple[int, ...] | None = None
    # For each channel that the layer gives, the vector that holds its bias and the place in there; empty for the bias
    # of the module, which is made if there is none.
    bias: tuple[tuple[str, int], ...] = ()

    @property
    def part(self) -> slice:
        """The layer's rows of the weight."""
        return slice(*self.rows or (None, ))


@dataclass
class Fold:
    """One norm: where it goes, or why it stays. Every name is the full one."""
    norm: str
    kind: str  # class of the norm
    sites: list[Site] = field(default_factory=list)
    pads: list[tuple[str, Pad]] = field(default_factory=list)  # modules that pad its output with zeros
    stream: Stream | None = None  # that it stands in
    untied: list[str] = field(default_factory=list)  # layers that get a weight of their own
    obstacle: str = ''
    beyond_float16: bool = False  # whether its padding token is too large for float16

    @property
    def where(self) -> str:
        """Where the norm went, or why it stays."""
        if self.obstacle:
            return self.obstacle
        if not self.sites:
            return ', '.join(self.stream.ends)
        layers = ', '.join(dict.fromkeys(site.layer for site in self.sites))
        filled = ' (padding filled, too large for float16)' if self.beyond_float16 else ' (padding filled)'
        note = filled if self.pads else ' (with a copy of its shared weight)' if self.untied else ''
        return ('back into ' if self.sites[0].after else '') + layers + note


@dataclass(frozen=True)
class FusionReport:
    """What :func:`mmunorm.fuse_norms` did; `str()` gives a table.

    Attributes:
        folded: the norms that are gone; `norm` is a name, `where` tells where it went.
        kept: the norms that are left; `where` tells why.
        difference: the largest between the model's outputs and those of its folded copy, over the largest value of an
            output. None where nothing was folded or could be compared.
    """
    folded: tuple[Fold, ...]
    kept: tuple[Fold, ...]
    difference: float | None = None

    def __str__(self) -> str:
        lines = [f'{len(self.folded)} of {len(self.folded) + len(self.kept)} norms folded']
        if self.difference is not None:
            lines.append(f'in an example, outputs change by {self.difference:.0e} of their largest value')
        if beyond := sum(fold.beyond_float16 for fold in self.folded):
            lines.append(f'{beyond} of them with padding too large for float16: there, call half() before fuse_norms()')
        for title, rows in (('folded', [(fold.norm, fold.kind, fold.where) for fold in self.folded]),
                            ('kept', by_reason(self.kept))):
            if rows:
                widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
                lines += ['', f'{title}:']
                lines += [f'  {norm:{widths[0]}}  {kind:{widths[1]}}  {where}' for norm, kind, where in rows]
        return '\n'.join(lines)


def by_reason(kept: Iterable[Fold]) -> list[tuple[str, str, str]]:
    """A row of name, class and reason for each norm; one alone for those that stay for the same reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for fold in kept:
        groups.setdefault((fold.kind, fold.where), []).append(fold.norm)
    return [(names[0] if len(names) == 1 else f'{names[0]} and {len(names) - 1} more', kind, why)
            for (kind, why), names in groups.items()]


class NotFoldedError(ValueError):
    """Norms cannot be folded, and all had to be."""


class NotExactError(RuntimeError):
    """The folded copy of a model computes something else than the model."""


def streams_of(folds: Iterable[Fold]) -> list[Stream]:
    """The streams that norms stand in, in order."""
    return list(dict.fromkeys(fold.stream for fold in folds if fold.stream is not None))
