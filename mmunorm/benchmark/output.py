"""Results of a benchmark as text, a chart and files."""
from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..utils import whole_file, write_text

NO_DIFFERENCE = 'no difference that this machine can show'
# Okabe and Ito's colour-blind safe palette, without yellow, which is hard to see on white.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#000000')


def quartiles(ratio: dict[str, float]) -> str:
    """Formats a :func:`.measure.ratio` as '1.102 [1.051, 1.148]'."""
    return f'{ratio["value"]:.3f} [{ratio["low"]:.3f}, {ratio["high"]:.3f}]'


def speedup(ratio: dict[str, float], control: dict[str, float] | None = None) -> str:
    """Formats a ratio of speeds, or states that it shows no difference.

    It shows none if its quartiles span 1, or if it is not further from 1 than `control`, the ratio of the same file in
    two processes.
    """
    if ratio['low'] <= 1 <= ratio['high'] or (
            control and abs(math.log(ratio['value'])) <= abs(math.log(control['value']))):
        return f'{NO_DIFFERENCE} [{ratio["low"]:.3f}, {ratio["high"]:.3f}]'
    return quartiles(ratio)


def speed_cell(throughput: dict[str, float]) -> str:
    """The median of images/s with its quartiles."""
    return f'{throughput["median"]:.4g} [{throughput["low"]:.4g}, {throughput["high"]:.4g}]'


def draw_bars(axes: Axes, series: Mapping[str, Mapping[str, dict[str, float] | float]], label: str) -> None:
    """Draws groups of bars, one colour per series; `series` has the values by name and group, `label` is for the axis.

    Values are numbers, or dicts of `median` or `value` and the quartiles `low` and `high`, drawn as error bars.
    """
    groups = list(dict.fromkeys(group for values in series.values() for group in values))
    width = 0.8 / max(len(series), 1)
    for i, (name, values) in enumerate(series.items()):
        positions = [groups.index(group) + (i - (len(series) - 1) / 2) * width for group in values]
        values = [value if isinstance(value, dict) else dict(value=value) for value in values.values()]
        heights = [value.get('value', value.get('median')) for value in values]
        errors = [[max(0, sign * (value.get(side, height) - height))
                   for value, height in zip(values, heights, strict=True)] for sign, side in ((-1, 'low'), (1, 'high'))]
        bars = axes.bar(positions, heights, width, yerr=errors, capsize=3, color=COLOURS[i % len(COLOURS)], label=name)
        axes.bar_label(bars, fmt='%.4g', label_type='center', fontsize=7, color='white')
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(label)
    if len(series) > 1:
        axes.legend()


def write_results(result: dict, text: str, figure: Figure, folder: str | Path, stem: str) -> None:
    """Writes a result as `.json`, its table as `.md` and its chart as `.png` to a folder; prints the table and their
    paths."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    print(text)
    paths = {suffix: Path(folder, f'{stem}.{suffix}') for suffix in ('json', 'md', 'png')}
    write_text(paths['json'], json.dumps(result, indent=1) + '\n')
    write_text(paths['md'], text)
    with whole_file(paths['png']) as part:
        figure.savefig(part, dpi=150)
    for path in paths.values():
        print(f'written: {path}')
