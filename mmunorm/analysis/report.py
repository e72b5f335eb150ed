"""One or several runs as one HTML page that opens from disk: it loads nothing and runs no script."""
from __future__ import annotations

import base64
import html
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from .curves import METRICS
from .figures import (
    DPI,
    cka_diagonal_figure,
    cka_figure,
    outliers_figure,
    pnac_density_figure,
    pnac_figure,
    pnac_layers_figure,
    scalar_figure,
    statistics_figure,
)
from .measures import FIELDS
from .record import RecordError
from .runs import WINDOW, MeasuredRun, Run
from .sources import distinct_names, refuse_twice

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #59636e; --paper: #fff; --line: #d1d9e0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --dim: #9aa4af; --paper: #14181d; --line: #3a424b; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 90rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .3rem; border-top: 1px solid var(--line); padding-top: 1rem; }
p { max-width: 46rem; margin: .3rem 0 .8rem; }
.dim, figcaption { color: var(--dim); font-size: .9rem; }
.runs { display: grid; gap: 1rem; margin-bottom: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; max-width: 36rem; }
img { display: block; width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: 4px; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
@media print {
  :root { color-scheme: light; --ink: #000; --dim: #444; --paper: #fff; --line: #bbb; }
  body { padding: 0; max-width: none; font-size: 10pt; }
  h2, section > p { break-after: avoid; }
  figure, p, tr { break-inside: avoid; }
  .runs { grid-template-columns: repeat(2, 1fr); }
}
"""


def build_report(measured: Sequence[MeasuredRun], cka: Sequence[dict] = ()) -> str:
    """The page.

    Args:
        measured: the runs, as :func:`runs.measure_runs` measures them.
        cka: summaries of CKA, as :func:`read_cka` reads them.
    """
    title = 'Norm statistics: ' + ', '.join(one.run.name for one in measured)
    parts = [f'<h1>{html.escape(title)}</h1>', _table(measured)]
    parts += _curves([one.run for one in measured])
    parts += _pnac(measured)
    parts += _channels(measured)
    parts += _outliers(measured)
    parts += _cka(cka)
    return ('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n'
            + '\n'.join(parts) + '\n</body>\n</html>\n')


def _table(measured: Sequence[MeasuredRun]) -> str:
    runs = [one.run for one in measured]
    rows = {'config': [run.config_name for run in runs],
            'norms': [run.norms for run in runs],
            'work directory': [str(run.folder) for run in runs],
            'last logged step': [str(run.last_step or '') for run in runs],
            'recorded steps': [_recorded(run) for run in runs]}
    for metric, label in METRICS.items():
        pairs = [run.last_and_best(metric) for run in runs]
        rows[f'{label}, last / best'] = [f'{pair[0]:.4g} / {pair[1]:.4g}' if pair else '' for pair in pairs]
    for field in FIELDS:
        rows[f'PNAC of {field}s, start / end (%)'] = [
            ' / '.join(f'{value:.1f}' for value in one.pnac.mean(field)[[0, -1]]) if one.pnac else ''
            for one in measured]
    shares = [run.outlier_share for run in runs]
    rows['outlier steps, share (%)'] = ['' if share is None else f'{100 * share:.1f}' for share in shares]
    head = ''.join(f'<th scope="col">{html.escape(run.name)}</th>' for run in runs)
    body = ''.join(
        f'<tr><th scope="row">{html.escape(label)}</th>'
        + ''.join(f'<td>{html.escape(cell) or "–"}</td>' for cell in cells) + '</tr>\n'
        for label, cells in rows.items() if any(cells))
    return f'<div class="table"><table>\n<thead><tr><th></th>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n' \
           '</table></div>'


def _recorded(run: Run) -> str:
    if run.record is None:
        return ''
    steps = run.record.steps
    return f'{len(steps)}, from step {steps[0]} to {steps[-1]}, of {len(run.record.layers)} layers'


def _curves(runs: Sequence[Run]) -> list[str]:
    logged = {run.name: run.scalars for run in runs if run.scalars}
    names = [name for name in ('loss', *METRICS) if any(name in scalars for scalars in logged.values())]
    pictures = [_picture(scalar_figure(logged, name),
                         f'{METRICS.get(name, name)} of {", ".join(logged)} over training') for name in names]
    return _section('Training curves', '', pictures)


def _pnac(measured: Sequence[MeasuredRun]) -> list[str]:
    found = {one.run.label: one.pnac for one in measured if one.pnac}
    notes = [note for one in measured for note in one.missing]
    notes += [f'{label}: {remark}' for label, measure in found.items() for remark in measure.remarks()]
    overview = [_picture(pnac_figure(found), 'Mean PNAC over training')] if found else []
    layers = [_picture(pnac_layers_figure(label, measure), f'PNAC by layer of {label}')
              for label, measure in found.items()]
    densities = [_picture(pnac_density_figure(label, measure), f'Density of PNAC of {label}')
                 for label, measure in found.items()]
    return _section(
        'PNAC: how mildly statistics fluctuate',
        'Of each layer, the percentage of channels whose statistics over a span of steps pass for normal '
        'noise (D\'Agostino and Pearson\'s test, p &gt; 0.05). High is mild. A trend within a span counts '
        'as fluctuation.', overview, notes, layers, densities)


def _channels(measured: Sequence[MeasuredRun]) -> list[str]:
    pictures = [_picture(statistics_figure(one.run.label, one.histories, WINDOW),
                         f'Statistics of single channels of {one.run.label}')
                for one in measured if one.histories]
    return _section(
        'Single channels around their highest peak',
        'Layers over the whole depth, and in each the channel with the highest peak against its median. AM '
        f'and GM are the arithmetic and geometric mean of the last {WINDOW} recorded steps; statistics that '
        'change their sign have no GM.', pictures)


def _outliers(measured: Sequence[MeasuredRun]) -> list[str]:
    pictures = [_picture(outliers_figure(one.run.label, *one.outliers),
                         f'Accumulated outlier steps of {one.run.label}')
                for one in measured if one.outliers]
    if not pictures:
        return []
    notes = [f'{one.run.label}: no layer has an outlier filter.'
             for one in measured if one.run.record is not None and one.outliers is None]
    return _section('Outlier steps', 'Steps on which a layer dropped its moving averages (Eq. 18-19).',
                    pictures, notes)


def _cka(summaries: Sequence[dict]) -> list[str]:
    pictures, diagonals = [], {}
    for summary in summaries:
        cka = np.array(summary['cka'], dtype=float)
        layers = summary['layers_a'], summary['layers_b']
        pictures.append(_picture(cka_figure(cka, *layers, summary['model_a'], summary['model_b']),
                                 f'Linear CKA between the layers of {summary["label"]}'))
        if layers[0] == layers[1]:
            diagonals.setdefault(tuple(layers[0]), {})[summary['label']] = cka.diagonal()
    pictures += [_picture(cka_diagonal_figure(lines, layers), 'Linear CKA at equal depth of '
                          + '; '.join(lines)) for layers, lines in diagonals.items()]
    return _section('CKA: how alike two models are',
                    'Linear CKA between the outputs of norm, attention and feed-forward layers on the same '
                    'pictures, 1 for layers that differ by a rotation and a scale. Estimated without bias '
                    'from small batches.', pictures)


def _section(title: str, text: str, pictures: Sequence[str], notes: Sequence[str] = (),
             *more_pictures: Sequence[str]) -> list[str]:
    """A heading, text, notes and rows of pictures."""
    if not pictures and not notes:
        return []
    parts = [f'<section>\n<h2>{title}</h2>']
    parts += [f'<p>{text}</p>'] if text else []
    parts += [f'<p class="dim">{html.escape(note)}</p>' for note in notes]
    for row in (pictures, *more_pictures):
        parts += ['<div class="runs">', *row, '</div>'] if row else []
    return [*parts, '</section>']


def _picture(figure: Figure, text: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI)
    data = base64.b64encode(buffer.getvalue()).decode()
    width, height = (round(DPI * inches) for inches in figure.get_size_inches())
    return (f'<figure><img src="data:image/png;base64,{data}" width="{width}" height="{height}" '
            f'alt="{html.escape(text, quote=True)}"></figure>')


def read_cka(paths: Sequence[str | Path]) -> list[dict]:
    """The contents of `cka.json` files, given by their paths or folders.

    Each gets a `label` that no other has: the names of its models, and where several compare models of the
    same names, the folder.

    Raises:
        RecordError: there is none, or it is something else, or one is named twice.
    """
    files = [Path(path, 'cka.json') if Path(path).is_dir() else Path(path) for path in paths]
    summaries = [_read_summary(file) for file in files]
    refuse_twice(files)
    pairs = [f'{summary["model_a"]} and {summary["model_b"]}' for summary in summaries]
    counts, folders = Counter(pairs), distinct_names([file.parent for file in files])
    for summary, pair, name in zip(summaries, pairs, folders, strict=True):
        summary['label'] = pair if counts[pair] == 1 else f'{pair} ({name})'
    return summaries


def _read_summary(path: Path) -> dict:
    try:
        summary = json.loads(path.read_text())
        missing = {'model_a', 'model_b', 'layers_a', 'layers_b', 'cka'} - set(summary)
    except OSError as error:
        raise RecordError(f'there is no {path}: tools/analysis/cka.py makes one.') from error
    except (ValueError, TypeError) as error:
        raise RecordError(f'{path} is no cka.json of tools/analysis/cka.py.') from error
    if missing:
        raise RecordError(f'{path} is no cka.json of tools/analysis/cka.py.')
    return summary
