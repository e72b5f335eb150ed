"""One or several runs as one HTML page that opens from disk: it loads nothing and runs no script."""
from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from mmengine.config import Config

from .curves import METRICS, Scalars, read_scalars
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
from .measures import (
    FIELDS,
    PNACOverTraining,
    around_peak,
    channel_history,
    interesting_channel,
    interesting_layers,
    measure_pnac,
)
from .outliers import accumulated_outliers
from .record import FILENAME, Record, RecordError
from .sources import distinct_names, find_record

WINDOW = 4

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


class Run(NamedTuple):
    """What a work directory has: `record`, `scalars` and `config` are None where it has none."""
    name: str
    folder: Path
    record: Record | None
    scalars: Scalars | None
    config: Config | None

    @property
    def label(self) -> str:
        """The name with the norms, for titles."""
        return f'{self.name} ({self.norms})' if self.norms else self.name

    @property
    def norms(self) -> str:
        """The norms that the record names."""
        if self.record is None:
            return ''
        return ', '.join(dict.fromkeys(layer.norm for layer in self.record.layers))


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Reads work directories.

    Raises:
        RecordError: one is no folder, or has neither a record nor a log, or one of them is damaged.
    """
    runs = []
    for name, folder in zip(distinct_names(folders), map(Path, folders), strict=True):
        if not folder.is_dir():
            raise RecordError(f'there is no work directory {folder}.')
        if any(run.folder.samefile(folder) for run in runs):
            raise RecordError(f'{folder} is named twice.')
        record = find_record(folder) if (folder / FILENAME).is_file() else None
        try:
            scalars = read_scalars(folder)
        except FileNotFoundError:
            scalars = None
        except ValueError as error:
            raise RecordError(f'{error}.') from error
        if record is None and scalars is None:
            raise RecordError(f'{folder} has neither a record ({FILENAME}) nor a log '
                              '(TIME/vis_data/scalars.json): it is no work directory of a training.')
        runs.append(Run(name, folder, record, scalars, _read_config(folder)))
    return runs


def _read_config(folder: Path) -> Config | None:
    for path in sorted(folder.glob('*.py')):
        try:
            return Config.fromfile(path, import_custom_modules=False)
        except Exception:  # a config is code; the page does without
            continue
    return None


def build_report(runs: Sequence[Run], cka: Sequence[dict] = (), span: int | None = None,
                 progress: bool = False) -> str:
    """The page.

    Args:
        runs: work directories, as :func:`read_runs` reads them.
        cka: contents of `cka.json` files of tools/analysis/cka.py.
        span (int, optional): recorded steps of a span for PNAC. Defaults to None: 100, or all if fewer.
        progress (bool): whether to show progress bars. Defaults to False.

    Raises:
        RecordError: `span` does not fit a record.
    """
    measures = _measure(runs, span, progress)
    title = 'Norm statistics: ' + ', '.join(run.name for run in runs)
    parts = [f'<h1>{html.escape(title)}</h1>', _table(runs, measures)]
    parts += _curves(runs)
    parts += _pnac(runs, measures)
    parts += _channels(runs)
    parts += _outliers(runs)
    parts += _cka(cka)
    return ('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n'
            + '\n'.join(parts) + '\n</body>\n</html>\n')


def _measure(runs: Sequence[Run], span: int | None,
             progress: bool) -> dict[str, PNACOverTraining | RecordError | None]:
    """PNAC of each run by name; a record that is too short for the default span is no reason to stop."""
    measures = {}
    for run in runs:
        try:
            measures[run.name] = run.record and measure_pnac(run.record, span, progress)
        except RecordError as error:
            if span is not None:
                raise
            measures[run.name] = error
    return measures


def _table(runs: Sequence[Run], measures: dict) -> str:
    rows = {'config': [_config_name(run) for run in runs],
            'norms': [run.norms for run in runs],
            'work directory': [str(run.folder) for run in runs],
            'last logged step': [_last_step(run) for run in runs],
            'recorded steps': [_recorded(run) for run in runs]}
    for metric in _metrics(runs):
        rows[f'{METRICS[metric]}, last / best'] = [_last_and_best(run, metric) for run in runs]
    for field in FIELDS:
        rows[f'PNAC of {field}s, start / end (%)'] = [
            ' / '.join(f'{value:.1f}' for value in measure.mean(field)[[0, -1]])
            if isinstance(measure, PNACOverTraining) else '' for measure in measures.values()]
    rows['outlier steps, share (%)'] = [_outlier_share(run) for run in runs]
    head = ''.join(f'<th scope="col">{html.escape(run.name)}</th>' for run in runs)
    body = ''.join(
        f'<tr><th scope="row">{html.escape(label)}</th>'
        + ''.join(f'<td>{html.escape(cell) or "–"}</td>' for cell in cells) + '</tr>\n'
        for label, cells in rows.items() if any(cells))
    return f'<div class="table"><table>\n<thead><tr><th></th>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n' \
           '</table></div>'


def _config_name(run: Run) -> str:
    if run.record is not None and run.record.info.get('config'):
        return run.record.info['config']
    return Path(run.config.filename).name if run.config is not None else ''


def _last_step(run: Run) -> str:
    steps = [values[-1, 0] for values in (run.scalars or {}).values() if len(values)]
    return f'{max(steps):.0f}' if steps else ''


def _recorded(run: Run) -> str:
    if run.record is None:
        return ''
    steps = run.record.steps
    return f'{len(steps)}, from step {steps[0]} to {steps[-1]}, of {len(run.record.layers)} layers'


def _metrics(runs: Sequence[Run]) -> list[str]:
    return [metric for metric in METRICS if any(metric in (run.scalars or {}) for run in runs)]


def _last_and_best(run: Run, metric: str) -> str:
    values = (run.scalars or {}).get(metric, np.empty((0, 2)))[:, 1]
    values = values[np.isfinite(values)]
    return f'{values[-1]:.4g} / {values.max():.4g}' if len(values) else ''


def _outlier_share(run: Run) -> str:
    if run.record is None:
        return ''
    last, steps = run.record.outliers()[-1], run.record.steps[-1]
    last = last[last >= 0]
    return f'{100 * last.mean() / steps:.1f}' if len(last) else ''


def _curves(runs: Sequence[Run]) -> list[str]:
    logged = {run.name: run.scalars for run in runs if run.scalars}
    names = [name for name in ('loss', *METRICS) if any(name in scalars for scalars in logged.values())]
    pictures = [_picture(scalar_figure(logged, name),
                         f'{METRICS.get(name, name)} of {", ".join(logged)} over training') for name in names]
    return _section('Training curves', '', pictures)


def _pnac(runs: Sequence[Run], measures: dict) -> list[str]:
    measured = {run.label: measures[run.name] for run in runs
                if isinstance(measures[run.name], PNACOverTraining)}
    notes = [str(measure) for measure in measures.values() if isinstance(measure, RecordError)]
    notes += [f'{label}: {remark}' for label, measure in measured.items() for remark in measure.remarks()]
    if not measured and not notes:
        return []
    overview = [_picture(pnac_figure(measured), 'Mean PNAC over training')] if measured else []
    layers = [_picture(pnac_layers_figure(label, measure), f'PNAC by layer of {label}')
              for label, measure in measured.items()]
    densities = [_picture(pnac_density_figure(label, measure), f'Density of PNAC of {label}')
                 for label, measure in measured.items()]
    return _section(
        'PNAC: how mildly statistics fluctuate',
        'Of each layer, the percentage of channels whose statistics over a span of steps pass for normal '
        'noise (D\'Agostino and Pearson\'s test, p &gt; 0.05). High is mild. A trend within a span counts '
        'as fluctuation.', overview, notes, layers, densities)


def _channels(runs: Sequence[Run]) -> list[str]:
    pictures, notes = [], []
    for run in runs:
        if run.record is None:
            continue
        if len(run.record.steps) < WINDOW:
            notes.append(f'{run.label}: fewer than {WINDOW} steps are recorded.')
            continue
        histories = []
        for layer in interesting_layers(run.record, 3):
            channel = interesting_channel(run.record, layer)
            rows = around_peak(run.record, layer, channel)
            histories += [channel_history(run.record, layer, channel, field, WINDOW, rows)
                          for field in FIELDS]
        pictures.append(_picture(statistics_figure(run.label, histories, WINDOW),
                                 f'Statistics of single channels of {run.label}'))
    return _section(
        'Single channels around their highest peak',
        'Layers over the whole depth, and in each the channel with the highest peak against its median. AM '
        f'and GM are the arithmetic and geometric mean of the last {WINDOW} recorded steps; statistics that '
        'change their sign have no GM.', pictures, notes)


def _outliers(runs: Sequence[Run]) -> list[str]:
    pictures, notes = [], []
    for run in runs:
        if run.record is None:
            continue
        try:
            layers, steps, counts = accumulated_outliers(run.record)
        except RecordError:
            notes.append(f'{run.label}: no layer has an outlier filter.')
            continue
        pictures.append(_picture(outliers_figure(run.label, layers, steps, counts),
                                 f'Accumulated outlier steps of {run.label}'))
    if not pictures:
        return []
    return _section('Outlier steps', 'Steps on which a layer dropped its moving averages (Eq. 18-19).',
                    pictures, notes)


def _cka(summaries: Sequence[dict]) -> list[str]:
    pictures, diagonals = [], {}
    for summary in summaries:
        names = summary['model_a'], summary['model_b']
        cka = np.array(summary['cka'], dtype=float)
        layers = summary['layers_a'], summary['layers_b']
        pictures.append(_picture(cka_figure(cka, *layers, *names),
                                 f'Linear CKA between the layers of {names[0]} and {names[1]}'))
        if layers[0] == layers[1]:
            diagonals.setdefault(tuple(layers[0]), {})[' and '.join(names)] = cka.diagonal()
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


def read_cka(path: str | Path) -> dict:
    """The contents of a `cka.json`, given by its path or its folder.

    Raises:
        RecordError: there is none, or it is something else.
    """
    path = Path(path)
    path = path / 'cka.json' if path.is_dir() else path
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
