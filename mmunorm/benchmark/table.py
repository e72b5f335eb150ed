"""Turns measured rows into ratios, a Markdown table, a chart and files."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ..analysis.curves import COLOURS
from ..utils import whole_file, write_text
from .measure import ratio
from .models import LN

COLUMNS = ('row', 'images/s (quartiles)', 'speed, x LN (quartiles)', 'ms/batch', 'peak memory MB', 'parameters M',
           'GFLOPs/image', 'norm calls', 'largest difference')


def summarize(rows: Sequence[dict], batch_size: int) -> list[dict]:
    """Adds throughput, latency and ratios to rows of measurements.

    Args:
        rows: each with `name`, `error` and `parameters`. A row without an error also has `peak_memory`, `flops`,
            `norm_calls` and `seconds` (list[float], one for each batch, of the same repeats in all rows).
        batch_size: images in a batch.

    Returns:
        New rows. `throughput` (images/s) and `latency_ms` are dicts of `median` and the quartiles `low` and `high`.
        `to_ln` has the ratios to LN: `throughput` and `latency_ms` as :func:`.measure.ratio` returns them, and
        `peak_memory`, `parameters` and `flops` as numbers. It is empty where LN or the row has failed.
    """
    ln = next((row for row in rows if row['name'] == LN), None)
    summaries = []
    for row in rows:
        row = dict(row, to_ln={})
        if row['error'] is None:
            seconds = np.array(row['seconds'])
            row['throughput'] = spread(batch_size / seconds)
            row['latency_ms'] = spread(1000 * seconds)
            if ln is not None and ln['error'] is None:
                row['to_ln'] = dict(throughput=ratio(ln['seconds'], row['seconds']),
                                    latency_ms=ratio(row['seconds'], ln['seconds']))
                for key in ('peak_memory', 'parameters', 'flops'):
                    row['to_ln'][key] = row[key] / ln[key]
        summaries.append(row)
    return summaries


def spread(values: np.ndarray) -> dict[str, float]:
    """`median` and the quartiles `low` and `high`."""
    low, median, high = np.percentile(values, (25, 50, 75))
    return dict(median=float(median), low=float(low), high=float(high))


def quartiles(ratio: dict[str, float]) -> str:
    """What :func:`.measure.ratio` gives, for the reader: '1.102 [1.051, 1.148]'."""
    return f'{ratio["value"]:.3f} [{ratio["low"]:.3f}, {ratio["high"]:.3f}]'


def speed_beside(ratio: dict[str, float]) -> str:
    """The same, and where the quartiles span 1 that it says nothing."""
    if ratio['low'] <= 1 <= ratio['high']:
        return f'no difference that this machine can show [{ratio["low"]:.3f}, {ratio["high"]:.3f}]'
    return quartiles(ratio)


def markdown(result: dict) -> str:
    """A result of :func:`run_benchmark` as Markdown: title, notes and the table."""
    folded, kept = result['fusion']['folded'], result['fusion']['kept']
    notes = [*result['notes'], f'Repeats: {result["settings"]["repeat"]}. The quartiles of a ratio are those of single '
             'rounds. In parentheses: x times LN.', f'Folded: {folded} of {folded + kept} norms.']
    lines = [f'# {result["title"]}: what folding gains', '', *(f'- {note}' for note in notes), '',
             f'| {" | ".join(COLUMNS)} |', '|---' * len(COLUMNS) + '|']
    lines += [f'| {" | ".join(_cells(row))} |' for row in result['rows']]
    if kept:
        lines += ['', 'Norms that stay, and why:', '', '```', result['fusion']['report'], '```']
    return '\n'.join(lines) + '\n'


def _cells(row: dict) -> list[str]:
    if row['error'] is not None:
        return [row['name'], row['error'], *['-'] * (len(COLUMNS) - 2)]
    ratios = row['to_ln']

    def with_ratio(text: str, key: str) -> str:
        return f'{text} ({ratios[key]:.3f}x)' if key in ratios else text

    speed, difference = row['throughput'], row.get('output_difference')
    return [
        row['name'],
        f'{speed["median"]:.4g} [{speed["low"]:.4g}, {speed["high"]:.4g}]',
        speed_beside(ratios['throughput']) if ratios and row['name'] != LN else '-',
        f'{row["latency_ms"]["median"]:.4g}',
        with_ratio(f'{row["peak_memory"] / 1e6:.1f}', 'peak_memory'),
        with_ratio(f'{row["parameters"] / 1e6:.3f}', 'parameters'),
        with_ratio(f'{row["flops"] / 1e9:.4g}', 'flops'),
        str(row['norm_calls']),
        f'{difference["absolute"]:.2g} ({difference["relative"]:.2g} of the largest output)'
        if difference else '-',
    ]


def chart(result: dict) -> Figure:
    """Bars of throughput and of peak memory relative to LN; absolute where LN has failed."""
    rows = [row for row in result['rows'] if row['error'] is None]
    relative = any(row['to_ln'] for row in rows)
    figure = Figure(figsize=(9, 3.6), layout='constrained')
    settings = result['settings']
    figure.suptitle(f'{result["title"]}: batch {settings["batch_size"]}, {settings["shape"][0]} x '
                    f'{settings["shape"][1]}, {result["environment"]["device"]}', fontsize=10)
    for axes, key, title, unit, scale in zip(
            figure.subplots(1, 2), ('throughput', 'peak_memory'),
            ('Throughput, more is better', 'Peak memory, less is better'), ('images/s', 'MB'), (1, 1e-6),
            strict=True):
        values = [(row['to_ln'] if relative else row)[key] for row in rows]
        middle = 'value' if relative else 'median'
        medians = [value[middle] if isinstance(value, dict) else value * (1 if relative else scale)
                   for value in values]
        errors = None
        if key == 'throughput':
            errors = [[max(0, value[middle] - value['low']) for value in values],
                      [max(0, value['high'] - value[middle]) for value in values]]
        colors = [COLOURS[i % len(COLOURS)] for i in range(len(rows))]
        axes.bar([row['name'] for row in rows], medians, yerr=errors, capsize=4, color=colors)
        for i, value in enumerate(medians):
            axes.annotate(f'{value:.3f}' if relative else f'{value:.4g}', (i, 0), (0, 4),
                          textcoords='offset points', ha='center')
        axes.set_title(title, fontsize=10)
        axes.set_ylabel(f'{unit} relative to LN' if relative else unit)
        if relative:
            axes.axhline(1, color='black', linewidth=0.8, linestyle='--')
    return figure


def write_results(result: dict, folder: str | Path) -> list[Path]:
    """Writes `benchmark.json`, `.md` and `.png` into a folder and returns their paths; makes the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f'benchmark.{suffix}' for suffix in ('json', 'md', 'png')]
    write_text(paths[0], json.dumps(result, indent=1) + '\n')
    write_text(paths[1], markdown(result))
    with whole_file(paths[2]) as part:
        chart(result).savefig(part, dpi=150)
    return paths
