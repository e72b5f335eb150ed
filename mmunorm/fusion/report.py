"""The report of a folding: the target of each norm, or why it was kept."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..utils import plural
from .folds import Fold, StreamBasis

PLAIN = 'without weights'  # what is left of a LayerNorm or RMSNorm


@dataclass(frozen=True)
class FusionReport:
    """The result of :func:`mmunorm.fuse_norms`; `str()` returns a table.

    Attributes:
        folded: the norms that are gone; `norm` is the name, `where` the layers.
        reduced: the LayerNorms and RMSNorms whose weights are folded; `left` is what stays.
        kept: the norms that were kept; `where` is the reason, `obstacle` the same as data.
        streams: the residual streams whose tokens the folded model has in another basis; `restore(tokens)` returns to
            that of the original model.
        attentions: number of attentions whose heads were rotated, or whose keys or values lost a constant.
        difference: the largest difference between the outputs of the model and of its folded copy in float64, divided
            by the largest value of an output. None if nothing was folded or nothing could be compared.
        rounding: for a model in float16 or bfloat16, the error of the folded model in this type against the original
            in float64, as a ratio of norms; None for other models.
        unseen: modules with parameters that no example reached.
    """
    folded: tuple[Fold, ...]
    kept: tuple[Fold, ...]
    difference: float | None = None
    reduced: tuple[Fold, ...] = ()
    streams: tuple[StreamBasis, ...] = ()
    attentions: int = 0
    rounding: float | None = None
    unseen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.summary]
        if self.difference is not None:
            lines.append(f'in an example, outputs change by {self.difference:.0e} of their largest value')
        if self.rounding is not None:
            lines.append(f'in its own type, the folded model is {self.rounding:.0e} from the original in float64')
        if beyond := sum(fold.beyond_float16 for fold in self.folded):
            lines.append(f'{beyond} of them with padding too large for float16: there, call half() before fuse_norms()')
        if self.streams:
            lines.append(f'{plural(len(self.streams), "residual stream")} rotated: report.streams')
        if self.attentions:
            lines.append(f'{plural(self.attentions, "attention")} rewritten')
        if self.unseen:
            more = f' and {len(self.unseen) - 4} more' if len(self.unseen) > 4 else ''
            lines.append(f'no example reached {", ".join(self.unseen[:4])}{more}')
        lines += self.notes
        kept, folded, reduced = ([(fold.norm, fold.kind, fold.where) for fold in folds]
                                 for folds in (self.kept, self.folded, self.reduced))
        not_rotated = [(fold.norm, fold.kind, str(fold.not_rotated)) for fold in self.reduced if fold.not_rotated]
        for title, rows in (('kept', by_reason(kept)), ('not rotated', by_reason(not_rotated)), ('folded', folded),
                            (f'now {PLAIN}', reduced)):
            if rows:
                widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
                lines += ['', f'{title}:']
                lines += [f'  {norm:{widths[0]}}  {kind:{widths[1]}}  {where}' for norm, kind, where in rows]
        return '\n'.join(lines)

    @property
    def summary(self) -> str:
        """One line."""
        total = len(self.folded) + len(self.reduced) + len(self.kept)
        if not total:
            return 'no norm to fold: its norms are folded already, or it has none'
        parts = []
        if self.folded or not self.reduced:
            parts.append(f'{len(self.folded)} folded')
        plain = Counter(fold.left for fold in self.reduced)
        if count := plain.pop(PLAIN, 0):
            parts.append(f'{count} {"is a norm" if count == 1 else "are now norms"} {PLAIN}')
        parts += [f'{count} {left}' for left, count in plain.items()]
        if self.kept:
            parts.append(f'{len(self.kept)} kept')
        return f'{plural(total, "norm")}: {", ".join(parts)}'


def by_reason(rows: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Rows of name, class and reason; norms of the same class and reason share a row."""
    groups: dict[tuple[str, str], list[str]] = {}
    for norm, kind, why in rows:
        groups.setdefault((kind, why), []).append(norm)
    return [(names[0] if len(names) == 1 else f'{names[0]} and {len(names) - 1} more', kind, why)
            for (kind, why), names in groups.items()]
