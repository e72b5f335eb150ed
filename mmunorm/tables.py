"""Tables in Markdown."""
from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; missing cells at the end of a row are dashes."""
    rows = [[*cells, *['-'] * (len(columns) - len(cells))] for cells in rows]
    return [f'| {" | ".join(columns)} |', '|---' * len(columns) + '|', *(f'| {" | ".join(cells)} |' for cells in rows)]
