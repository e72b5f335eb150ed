"""The report of a conversion, as text and Markdown, and its error."""
from __future__ import annotations

from dataclasses import dataclass

from ..tables import markdown_table
from ..utils import plural

# The error up to which a norm counts as converted without loss, and the error above which it loses much.
GOOD, MUCH = 0.01, 0.05
COLUMNS = ('norm', 'CV', 'least error', 'error', 'verdict')


class ConversionError(ValueError):
    """A model cannot be converted. It is unchanged."""


@dataclass(frozen=True)
class ConvertedNorm:
    """One norm. Errors are relative to `E|LN(x) - beta|^2`; None: not measured."""
    norm: str  # full name of the layer
    cv: float | None = None  # coefficient of variation of the tokens' deviation, std(sigma) / mean(sigma)
    least: float | None = None  # the least error of a scale and shift per channel, on inputs in the LN model
    error: float | None = None  # the error of the norm's scale and shift, on inputs from the converted layers before it
    kept: str = ''  # why the layer is still LayerNorm, or ''

    @property
    def verdict(self) -> str:
        """A verdict of a few words. Keeping a norm helps if its own error is large."""
        if self.kept:
            return f'kept: {self.kept}'
        if self.error <= GOOD:
            return 'good'
        if self.least > MUCH:
            return 'loses much by itself: train, or keep it'
        return 'loses by those before it: train' if self.error > MUCH else 'fair: train'


@dataclass(frozen=True)
class ConversionReport:
    """The result of :func:`mmunorm.convert_norms`; `str()` returns a table.

    Attributes:
        norms: all LayerNorms of the model, in the order in which they run.
        samples: number of samples of the statistics; 0 if unknown.
        notes: a line on what is suspicious about the images, such as too few; mostly empty.
    """
    norms: tuple[ConvertedNorm, ...]
    samples: int = 0
    notes: tuple[str, ...] = ()

    @property
    def converted(self) -> tuple[ConvertedNorm, ...]:
        """The norms that were converted."""
        return tuple(norm for norm in self.norms if not norm.kept)

    @property
    def kept(self) -> tuple[ConvertedNorm, ...]:
        """The norms that are still LayerNorm; their `kept` is the reason."""
        return tuple(norm for norm in self.norms if norm.kept)

    def summary(self) -> str:
        """One line with the number of norms and samples."""
        of = f', statistics of {plural(self.samples, "sample")}' if self.samples else ''
        left = f', {len(self.kept)} kept' if self.kept else ''
        return f'{len(self.converted)} of {plural(len(self.norms), "LayerNorm")} converted{left}{of}'

    def __str__(self) -> str:
        rows = [COLUMNS, *map(_cells, self.norms)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        form = '  '.join([f'{{:{widths[0]}}}', *(f'{{:>{width}}}' for width in widths[1:-1]), '{}'])  # numbers right
        return '\n'.join([self.summary(), *self.notes, '', *(form.format(*row) for row in rows)])

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = markdown_table(COLUMNS, ([f'`{name}`', *cells] for name, *cells in map(_cells, self.norms)))
        return '\n'.join([self.summary() + '.', *(f'\n{note}.' for note in self.notes), '', *lines, ''])


def _cells(norm: ConvertedNorm) -> tuple[str, ...]:
    numbers = (norm.cv, '{:.3f}'), (norm.least, '{:.2%}'), (norm.error, '{:.2%}')
    return norm.norm, *('-' if value is None else form.format(value) for value, form in numbers), norm.verdict
