"""Panels, title, legend and height of a figure; matplotlib's constrained layout does the rest."""
from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mmunorm.utils import whole_file

DPI = 200
# Inches.
WIDTH = 4.5  # legible on a phone
_CHARACTER = 0.075  # of the small font
_HANDLE = 0.5  # the line before a legend's text, and the gap
_TALL = 30.0  # more than the text around panels takes


def wrapped(text: str, inches: float) -> str:
    """Breaks a text into lines of about a width: between words, or inside a word that is longer than a line."""
    return textwrap.fill(text, max(10, int(inches / _CHARACTER)))


def new_panels(rows: int = 1, columns: int = 1, width: float = WIDTH, **kwargs) -> tuple[Figure, list[Axes]]:
    """A figure of so many inches and its panels, row by row; `kwargs` go to `subplots`."""
    figure = Figure(figsize=(width, 1), layout='constrained')
    panels = list(figure.subplots(rows, columns, squeeze=False, **kwargs).flat)
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def finish(figure: Figure, inches: float, title: str, below: Sequence[str] = (),
           handles: Mapping[str, Artist] | None = None) -> None:
    """Adds title and legend, and sets the figure's height so that each panel is `inches` high.

    Args:
        figure: a figure with the layout 'constrained'.
        inches: height of a panel without its labels.
        title: title of the figure.
        below: lines below the title.
        handles: entries of the legend by name. Defaults to None, for the lines of all panels.
    """
    width = figure.get_figwidth()
    figure.suptitle('\n'.join(wrapped(line, width) for line in (title, *below)), fontsize='small')
    if handles is None:
        handles = {label: handle for axes in figure.axes
                   for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        labels = [wrapped(label, width - _HANDLE) for label in handles]
        columns = int(width / (_HANDLE + _CHARACTER * max(map(len, labels))))
        figure.legend(list(handles.values()), labels, loc='outside lower center', fontsize='small',
                      ncols=min(max(1, columns), len(labels)))
    figure.set_figheight(_TALL)
    figure.draw_without_rendering()
    rows = figure.axes[0].get_subplotspec().get_gridspec().nrows
    text = _TALL - rows * figure.axes[0].get_window_extent().height / figure.dpi
    figure.set_figheight(text + rows * inches)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure to an image file."""
    with whole_file(path) as part:
        figure.savefig(part, dpi=DPI)
