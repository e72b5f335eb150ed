"""The effect of folding: rows compared with LN, as ratios, a table and a chart."""
from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ..tables import markdown_table
from ..utils import plural
from .measure import ratio, speed
from .models import LN
from .output import draw_bars, speed_cell, speedup

COLUMNS = ('row', 'images/s (quartiles)', 'speed, x LN (quartiles)', 'ms/batch', 'peak memory MB', 'parameters M',
           'GFLOPs/image', 'norm calls', 'largest difference')


def summarize(rows: Sequence[dict], batch_size: int) -> list[dict]:
    """Rows of measurements, see :func:`.folding.run_benchmark`, with throughput, latency and ratios.

    These are from :func:`.measure.speed`. `to_ln` has the ratios to LN: `throughput` and `latency_ms` are results of
    :func:`.measure.ratio`; `peak_memory`, `parameters` and `flops` are numbers. It is empty if LN or the row failed.
    """
    ln = next(row for row in rows if row['name'] == LN)
    summaries = []
    for row in rows:
        row = dict(row, to_ln={})
        if row['error'] is None:
            row.update(speed(row['seconds'], batch_size))
            if ln['error'] is None:
                row['to_ln'] = dict(throughput=ratio(ln['seconds'], row['seconds']),
                                    latency_ms=ratio(row['seconds'], ln['seconds']))
                for key in ('peak_memory', 'parameters', 'flops'):
                    row['to_ln'][key] = row[key] / ln[key]
        summaries.append(row)
    return summaries


def markdown(result: dict) -> str:
    """A result of :func:`run_benchmark` as Markdown: title, notes and the table."""
    folded, reduced, kept = (result['fusion'][key] for key in ('folded', 'reduced', 'kept'))
    notes = [*result['notes'], f'Repeats: {result["settings"]["repeat"]}. The quartiles of a ratio are over single '
             'rounds. In parentheses: relative to LN.', f'Folded: {folded} of {plural(folded + reduced + kept, "norm")}'
             f'{f", {reduced} except a scale of each token" if reduced else ""}.']
    lines = [f'# {result["title"]}: effect of folding', '', *(f'- {note}' for note in notes), '',
             *markdown_table(COLUMNS, map(_cells, result['rows']))]
    if kept:
        lines += ['', 'Norms that were kept, and why:', '', '```', result['fusion']['report'], '```']
    return '\n'.join(lines) + '\n'


def _cells(row: dict) -> list[str]:
    if row['error'] is not None:
        return [row['name'], row['error']]
    ratios = row['to_ln']

    def with_ratio(text: str, key: str) -> str:
        return f'{text} ({ratios[key]:.3f}x)' if key in ratios else text

    cells = [
        row['name'], speed_cell(row['throughput']),
        speedup(ratios['throughput']) if ratios and row['name'] != LN else '-',
        f'{row["latency_ms"]["median"]:.4g}',
        with_ratio(f'{row["peak_memory"] / 1e6:.1f}', 'peak_memory'),
        with_ratio(f'{row["parameters"] / 1e6:.3f}', 'parameters'),
        with_ratio(f'{row["flops"] / 1e9:.4g}', 'flops'),
        str(row['norm_calls']) + (f', {row["scale_calls"]} scales' if row['scale_calls'] else ''),
    ]
    if difference := row.get('output_difference'):
        cells.append(f'{difference["absolute"]:.2g} ({difference["relative"]:.2g} of the largest output)')
    return cells


def chart(result: dict) -> Figure:
    """Bars of throughput and of peak memory relative to LN; absolute if LN failed."""
    rows = [row for row in result['rows'] if row['error'] is None]
    relative = any(row['to_ln'] for row in rows)
    settings = result['settings']
    figure = Figure(figsize=(9, 3.6), layout='constrained')
    figure.suptitle(f'{result["title"]}: batch {settings["batch_size"]}, {settings["shape"][0]} x '
                    f'{settings["shape"][1]}, {result["environment"]["device"]}', fontsize=10)
    left, right = figure.subplots(1, 2)
    unit = ' relative to LN' if relative else ''
    speeds = {row['name']: (row['to_ln'] if relative else row)['throughput'] for row in rows}
    memory = {row['name']: row['to_ln']['peak_memory'] if relative else row['peak_memory'] / 1e6 for row in rows}
    for axes, values, label, title in ((left, speeds, 'images/s', 'Throughput, more is better'),
                                       (right, memory, 'MB', 'Peak memory, less is better')):
        draw_bars(axes, {'': values}, label + unit)
        axes.set_title(title, fontsize=10)
        if relative:
            axes.axhline(1, color='black', linewidth=0.8, linestyle='--')
    return figure
