"""Room for the text of a picture: text is wrapped, and the picture grows with it."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

# Of a legend beside its text: the frame, the line, and what is between.
_LEGEND_REST = 0.8  # inches
_TALL = 30.0  # inches; more than the text around axes takes


def wrapped(text: str, inches: float, size: str = 'medium') -> str:
    """Text in lines of a width at most, broken behind spaces, slashes, dots, dashes and underscores.

    A piece that is wider is broken anywhere.
    """
    font = FontProperties(size=size)

    def fits(line: str) -> bool:
        line = line.strip()
        # Text is drawn with hinting, a little wider than its outlines.
        return not line or TextPath((0, 0), line, prop=font).get_extents().width < 0.95 * 72 * inches

    lines = ['']
    for piece in re.split(r'(?<=[ /_.-])', text):
        if fits(lines[-1] + piece):
            lines[-1] += piece
            continue
        lines.append('')
        for character in piece:
            if lines[-1] and not fits(lines[-1] + character):
                lines.append('')
            lines[-1] += character
    return '\n'.join(line.strip() for line in lines if line.strip())


def set_title(figure: Figure, title: str, below: Sequence[str] = ()) -> None:
    """A title over the whole width, and lines below it, each wrapped."""
    width = figure.get_figwidth()
    figure.suptitle('\n'.join(wrapped(line, width) for line in (title, *below)), fontsize='medium')


def panel_handles(panels: Sequence[Axes]) -> dict[str, Artist]:
    """What the lines of all panels are called, each name once."""
    return {label: handle for axes in panels
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}


def legend_below(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """A legend below the panels, of as many columns as the width has room for."""
    count = len(handles)
    labels = [wrapped(label, figure.get_figwidth() - _LEGEND_REST, 'small') for label in handles]
    for rows in range(1, count + 1):
        legend = figure.legend(list(handles.values()), labels, loc='outside lower center',
                               ncols=-(-count // rows), fontsize='small')
        if rows == count or legend.get_window_extent().width < 0.97 * figure.bbox.width:
            return
        legend.remove()


def fit_height(figure: Figure, axes: Axes, inches: float) -> None:
    """Makes the figure as high as its text needs to leave each row of panels `inches`.

    Args:
        figure: laid out as 'constrained'.
        axes: one of the panels.
        inches: height inside the axes.
    """
    rows = axes.get_subplotspec().get_gridspec().nrows
    figure.set_figheight(_TALL)
    for _ in range(2):  # a small share of the space between panels grows with the figure
        figure.draw_without_rendering()
        rest = figure.get_figheight() - rows * axes.get_window_extent().height / figure.dpi
        figure.set_figheight(rest + rows * inches)
