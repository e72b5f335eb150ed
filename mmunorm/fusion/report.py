"""The report of a folding: the target of each norm, or why it was kept."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..utils import plural
from .joint import JointFold
from .rules import Pad

if TYPE_CHECKING:
    from .basis import BasisChange

SCALE = 'a scale of each token'


@dataclass(frozen=True)
class Site:
    """A layer that a norm is folded into: a consumer of the norm, or with `after` a layer before it."""
    layer: str  # full name of the module that holds the weight
    after: bool = False
    weight: str = 'weight'  # its name in that module
    rows: tuple[int, int] | None = None  # the rows of the weight that are the layer's, [first, end); None for all
    # For each input channel of the layer (`after`: output channel), the norm's channel, or -1; None for the identity.
    channels: tuple[int, ...] | None = None
    # For each output channel of the layer, the vector that holds its bias and the index in it; empty for the bias of
    # the module, which is created if there is none.
    bias: tuple[tuple[str, int], ...] = ()

    @property
    def part(self) -> slice:
        """The layer's rows of the weight."""
        return slice(*self.rows or (None, ))


@dataclass
class Fold:
    """One norm: the layers it is folded into, or why it is kept. All names are full names."""
    norm: str
    kind: str  # class of the norm
    sites: list[Site] = field(default_factory=list)
    pads: list[tuple[str, Pad]] = field(default_factory=list)  # modules that pad its output with zeros
    joint: JointFold | None = None  # what it folds together with
    norms_after: list[str] = field(default_factory=list)  # other norms that consume it, in a joint fold
    copied: list[str] = field(default_factory=list)  # layers that get a copy of their shared weight
    obstacle: str = ''
    beyond_float16: bool = False  # whether its padding token is too large for float16
    left: str = ''  # what stays of a LayerNorm or RMSNorm that is folded in part
    why_left: str = ''  # why no more of it is folded, if more could be

    @property
    def where(self) -> str:
        """Where the norm was folded, or why it was kept."""
        if self.obstacle:
            return self.obstacle
        if not self.sites:
            return ', '.join(self.norms_after)
        layers = ', '.join(dict.fromkeys(site.layer for site in self.sites))
        filled = ' (padding filled, too large for float16)' if self.beyond_float16 else ' (padding filled)'
        note = filled if self.pads else ' (with a copy of its shared weight)' if self.copied else ''
        return ('back into ' if self.sites[0].after else '') + layers + note


@dataclass(frozen=True)
class FusionReport:
    """The result of :func:`mmunorm.fuse_norms`; `str()` returns a table.

    Attributes:
        folded: the norms that are gone; `norm` is the name, `where` the layers.
        reduced: the LayerNorms and RMSNorms of which a part is folded; `left` is what stays, `why_left` why.
        kept: the norms that were kept; `where` is the reason.
        streams: the residual streams whose tokens the folded model has in another basis, or without their mean;
            `restore(tokens)` returns to that of the original model.
        difference: the largest difference between the outputs of the model and of its folded copy, divided by the
            largest value of an output. None if nothing was folded or nothing could be compared.
    """
    folded: tuple[Fold, ...]
    kept: tuple[Fold, ...]
    difference: float | None = None
    reduced: tuple[Fold, ...] = ()
    streams: tuple[BasisChange, ...] = ()

    def __str__(self) -> str:
        total = len(self.folded) + len(self.reduced) + len(self.kept)
        if not total:
            return 'no norm to fold: its norms are folded already, or it has none'
        norms, lefts = plural(total, 'norm'), Counter(fold.left for fold in self.reduced)
        lines = [f'{len(self.folded)} of {norms} folded'] if self.folded or not self.reduced else []
        lines += [f'{count} of {norms} folded except {left}' for left, count in lefts.most_common()]
        if self.difference is not None:
            lines.append(f'in an example, outputs change by {self.difference:.0e} of their largest value')
        if beyond := sum(fold.beyond_float16 for fold in self.folded):
            lines.append(f'{beyond} of them with padding too large for float16: there, call half() before fuse_norms()')
        if self.streams:
            lines.append('tokens inside the model are in another basis, or without their mean: report.streams')
        for title, rows in (('folded', [(fold.norm, fold.kind, fold.where) for fold in self.folded]),
                            ('folded in part', [(fold.norm, fold.kind, _part(fold)) for fold in self.reduced]),
                            ('kept', by_reason(self.kept))):
            if rows:
                widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
                lines += ['', f'{title}:']
                lines += [f'  {norm:{widths[0]}}  {kind:{widths[1]}}  {where}' for norm, kind, where in rows]
        return '\n'.join(lines)


def _part(fold: Fold) -> str:
    why = f' ({fold.why_left})' if fold.why_left else ''
    return f'{fold.left} left{why}' if fold.obstacle else f'{fold.where}; {fold.left} left{why}'


def by_reason(kept: Iterable[Fold]) -> list[tuple[str, str, str]]:
    """Rows of name, class and reason; norms of the same class kept for the same reason share a row."""
    groups: dict[tuple[str, str], list[str]] = {}
    for fold in kept:
        groups.setdefault((fold.kind, fold.where), []).append(fold.norm)
    return [(names[0] if len(names) == 1 else f'{names[0]} and {len(names) - 1} more', kind, why)
            for (kind, why), names in groups.items()]


class NotFoldedError(ValueError):
    """Norms cannot be folded, and `strict` is set."""


class NotExactError(RuntimeError):
    """The folded copy of a model does not compute the same as the model."""
