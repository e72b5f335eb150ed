"""A report of one or several runs as a self-contained HTML page without scripts."""
from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mmunorm.cli.page import render_page

from . import figures
from .curves import METRICS, metric_label
from .layout import DPI
from .measures import FIELDS
from .norm_record import RecordError
from .work_dirs import WINDOW, MeasuredRun, WorkDir, check_unique, distinct_names


@dataclass
class Section:
    """A heading, text, notes and rows of images; omitted without images and notes."""
    title: str
    text: str
    images: list[list[Panel]]
    notes: Sequence[str] = ()


class Panel:
    """A PNG in base64, its size in pixels, and its description."""

    def __init__(self, figure: Figure, text: str):
        content = io.BytesIO()
        figure.savefig(content, dpi=DPI)
        self.data = base64.b64encode(content.getvalue()).decode()
        self.width, self.height = (round(DPI * inches) for inches in figure.get_size_inches())
        self.text = text


def build_report(measured: Sequence[MeasuredRun], cka: Sequence[dict] = ()) -> str:
    """The page of runs from :func:`.work_dirs.measure_work_dir`, with CKA from :func:`read_cka`."""
    runs = [item.run.name for item in measured]
    sections = [_curves([item.run for item in measured]), _pnac(measured), _channels(measured),
                _mean_shares(measured), _outliers(measured), _cka(cka)]
    rows = [['', *runs], *([label, *cells] for label, cells in _rows(measured).items() if any(cells))]
    return render_page(Path(__file__).with_name('report.html.jinja'), 'Norm statistics: ' + ', '.join(runs), rows=rows,
                       sections=sections)


def _rows(measured: Sequence[MeasuredRun]) -> dict[str, list[str]]:
    """The table of settings and results: for the label of each row, one cell per run."""
    runs = [item.run for item in measured]
    rows = {'config': [run.config_name for run in runs],
            'norms': [run.norms for run in runs],
            'work directory': [str(run.folder) for run in runs],
            'last logged step': [str(run.last_step or '') for run in runs],
            'recorded steps': [run.record and f'{len(run.record.steps)}, from step {run.record.steps[0]} to '
                               f'{run.record.steps[-1]}, of {len(run.record.layers)} layers' for run in runs]}
    for metric, label in METRICS.items():
        pairs = [run.last_and_best(metric) for run in runs]
        rows[f'{label}, last / best'] = [f'{pair[0]:.4g} / {pair[1]:.4g}' if pair else '' for pair in pairs]
    for field in FIELDS:
        rows[f'PNAC of {field}s, start / end (%)'] = [
            ' / '.join(f'{value:.1f}' for value in item.pnac.mean(field)[[0, -1]]) if item.pnac else ''
            for item in measured]
    shares = [run.outlier_share for run in runs]
    rows['outlier steps, share (%)'] = ['' if share is None else f'{100 * share:.1f}' for share in shares]
    return rows


def _curves(runs: Sequence[WorkDir]) -> Section:
    logged = {run.name: run.scalars for run in runs if run.scalars}
    names = [name for name in ('loss', *METRICS) if any(name in scalars for scalars in logged.values())]
    return Section('Training curves', '', [[
        Panel(figures.scalar_figure(logged, name), f'{metric_label(name)} of {", ".join(logged)} over training')
        for name in names]])


def _pnac(measured: Sequence[MeasuredRun]) -> Section:
    found = {item.run.label: item.pnac for item in measured if item.pnac}
    notes = [note for item in measured for note in item.missing]
    notes += [f'{label}: {note}' for label, measure in found.items() for note in measure.notes()]
    return Section(
        'PNAC: fluctuation of statistics',
        'For each layer: the percentage of channels whose statistics over a span of steps pass for normal '
        "noise (D'Agostino and Pearson's test, p > 0.05). A high value means mild fluctuation. A trend within a "
        'span counts as fluctuation.',
        [[Panel(figures.pnac_figure(found), 'Mean PNAC over training')] if found else [],
         [Panel(figures.pnac_layers_figure(label, pnac), f'PNAC by layer of {label}') for label, pnac in found.items()],
         [Panel(figures.pnac_density_figure(label, pnac), f'Density of PNAC of {label}')
          for label, pnac in found.items()]], notes)


def _channels(measured: Sequence[MeasuredRun]) -> Section:
    return Section(
        'Single channels around their highest peak',
        'Some layers over the whole depth, each with its channel of the highest peak relative to the median. AM '
        f'and GM are the arithmetic and geometric mean of the last {WINDOW} recorded steps. Statistics that '
        'change their sign have no GM.',
        [[Panel(figures.statistics_figure(item.run.label, item.histories, WINDOW),
                f'Statistics of single channels of {item.run.label}') for item in measured if item.histories]])


def _mean_shares(measured: Sequence[MeasuredRun]) -> Section:
    return Section(
        'Share of the mean in the input',
        'The mean over tokens, squared, as a share of the mean square. Where it is large, a norm that does not '
        'subtract the mean (UN, RMSNorm) scales by the mean and not by what differs between tokens. `centered=True` '
        'subtracts it.',
        [[Panel(figures.mean_shares_figure(item.run.label, item.mean_shares),
                f'Share of the mean in the input of each norm of {item.run.label}')
          for item in measured if item.mean_shares]])


def _outliers(measured: Sequence[MeasuredRun]) -> Section:
    images = [Panel(figures.outliers_figure(item.run.label, *item.outliers),
                    f'Accumulated outlier steps of {item.run.label}') for item in measured if item.outliers]
    notes = [f'{item.run.label}: no layer has an outlier filter.'
             for item in measured if images and item.run.record is not None and item.outliers is None]
    return Section('Outlier steps', 'Steps on which a layer dropped its moving averages (Eq. 18-19).',
                   [images], notes)


def _cka(summaries: Sequence[dict]) -> Section:
    images, diagonals = [], {}
    for summary in summaries:
        cka = np.array(summary['cka'], dtype=float)
        layers = summary['layers_a'], summary['layers_b']
        images.append(Panel(figures.cka_figure(cka, *layers, summary['model_a'], summary['model_b']),
                            f'Linear CKA between the layers of {summary["label"]}'))
        if layers[0] == layers[1]:
            diagonals.setdefault(tuple(layers[0]), {})[summary['label']] = cka.diagonal()
    images += [Panel(figures.cka_diagonal_figure(lines, layers), f'Linear CKA at equal depth of {"; ".join(lines)}')
               for layers, lines in diagonals.items()]
    return Section('CKA: similarity of two models',
                   'Linear CKA between the outputs of norm, attention and feed-forward layers on the same '
                   'images. It is 1 for layers that differ only by a rotation and a scale. The estimate from '
                   'small batches has no bias.', [images])


def read_cka(paths: Sequence[str | Path]) -> list[dict]:
    """Reads `cka.json` files, given by their paths or folders.

    Each summary gets a unique `label`: the names of its models, with the folder if several have the same names.

    Raises:
        RecordError: a file is missing, is not a `cka.json`, or is given twice.
    """
    files = [Path(path, 'cka.json') if Path(path).is_dir() else Path(path) for path in paths]
    summaries = [_read_summary(file) for file in files]
    check_unique(files)
    pairs = [f'{summary["model_a"]} and {summary["model_b"]}' for summary in summaries]
    counts, folders = Counter(pairs), distinct_names([file.parent for file in files])
    for summary, pair, name in zip(summaries, pairs, folders, strict=True):
        summary['label'] = pair if counts[pair] == 1 else f'{pair} ({name})'
    return summaries


def _read_summary(path: Path) -> dict:
    try:
        summary = json.loads(path.read_text())
        if {'model_a', 'model_b'} <= set(summary) and np.array(summary['cka'], dtype=float).shape == (
                len(summary['layers_a']), len(summary['layers_b'])):
            return summary
    except OSError as error:
        raise RecordError(f'there is no {path}: create it with projects/paper/tools/cka.py.') from error
    except (KeyError, ValueError, TypeError):
        pass
    raise RecordError(f'{path} is not a cka.json of projects/paper/tools/cka.py.')
