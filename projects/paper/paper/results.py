"""The table, the numbers and the figure of a comparison."""
from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from mmunorm.tables import markdown_table
from mmunorm.utils import write_text

from .curves import METRICS, curves_figure, read_scalars
from .layout import save
from .measures import write_csv
from .runs import BASELINE, ERROR, FAIL, FINISHED, MISSING, ComparedRun

Results = Mapping[ComparedRun, dict]


def results_of(runs: Iterable[ComparedRun], errors: Mapping[ComparedRun, str]) -> Results:
    """The results of runs; the status of unfinished ones is MISSING, or ERROR after an error."""
    return {run: run.result() or dict(status=ERROR if run in errors else MISSING, step='', metrics={},
                                      message=errors.get(run, '')) for run in runs}


def write_files(out: Path, name: str, lines: Sequence[str], columns: Sequence[str], rows: Iterable[Sequence],
                figure: Figure | None) -> list[Path]:
    """Writes the lines of NAME.md, the rows of NAME.csv and, if there is a figure, NAME.png; returns the files."""
    table, numbers, image = (out / f'{name}.{suffix}' for suffix in ('md', 'csv', 'png'))
    write_text(table, '\n'.join(lines) + '\n')
    write_csv(numbers, columns, rows)
    if figure is None:
        return [table, numbers]
    save(figure, image)
    return [table, numbers, image]


def write_norms(out: Path, name: str, runs: Sequence[ComparedRun], errors: Mapping[ComparedRun, str],
                header: str, recipe: str) -> list[Path]:
    """Writes a table (NAME.md), a CSV and a figure of the curves (PNG) into `out`; returns the files, the table first.

    In the CSV, `last_logged_step` is the last step in a finished run's log; the run may have more steps.
    `failed_step` is the first bad step of a diverged run. There is no figure until a run has finished.

    Args:
        runs: all runs of the comparison, finished or not.
        errors: the errors of crashed runs.
        header: header of the table, in Markdown.
        recipe: the name of the recipe, for the title of the figure.
    """
    results = results_of(runs, errors)
    metrics = metrics_of(results)
    rows = []
    for run, result in results.items():
        steps = ('', result['step']) if result['status'] == FAIL else (result['step'], '')
        rows.append((run.norm, run.condition, run.seed, result['status'], *steps,
                     *(result['metrics'].get(metric, '') for metric in metrics), run.work_dir.relative_to(out)))
    return write_files(
        out, name, [header.rstrip(), '', *_tables(results, metrics), *result_notes(results)],
        ('norm', 'condition', 'seed', 'status', 'last_logged_step', 'failed_step', *metrics, 'work_dir'), rows,
        _curves(results, metrics, recipe))


def metrics_of(results: Results) -> list[str]:
    """The metrics to show: those of finished runs that have a label, else all."""
    names = dict.fromkeys(name for result in results.values() for name in result['metrics'])
    return [name for name in METRICS if name in names] or list(names)


def _curves(results: Results, metrics: Sequence[str], recipe: str) -> Figure | None:
    ended = [run for run, result in results.items() if result['status'] in (FINISHED, FAIL)]
    if not ended:
        return None
    conditions = list(dict.fromkeys(run.condition for run in ended))
    # A norm has the same colour in every figure of this comparison, finished or not.
    norms = dict.fromkeys(run.norm for run in results)
    panels = {'' if conditions == [BASELINE] else condition: {
        norm: [read_scalars(run.work_dir) for run in ended if (run.condition, run.norm) == (condition, norm)]
        for norm in norms} for condition in conditions}
    notes = []
    counts = {len(group) for groups in panels.values() for group in groups.values()} - {0}
    if max(counts) > 1:
        number = max(counts) if len(counts) == 1 else f'up to {max(counts)}'
        notes.append(f'A line is the mean of {number} seeds, with a band from minimum to maximum.')
    if any(result['status'] == FAIL for result in results.values()):
        notes.append(f'Runs that diverged ({FAIL}) end where they were stopped.')
    return curves_figure(panels, ['loss', *metrics], f'Norms compared: {recipe}', notes)


def _tables(results: Results, metrics: Sequence[str]) -> list[str]:
    norms, seeds, conditions = (list(dict.fromkeys(values)) for values in zip(
        *((run.norm, run.seed, run.condition) for run in results), strict=True))
    by_key = {(run.norm, run.seed, run.condition): result for run, result in results.items()}
    lines = []
    for metric in metrics or ['']:
        columns = [column for condition in ([''] if conditions == [BASELINE] else [f'{c}: ' for c in conditions])
                   for column in (f'{condition}mean ± std', *(f'{condition}seed {seed}' for seed in seeds))]
        rows = []
        for norm in norms:
            rows.append([norm])
            for condition in conditions:
                group = [by_key[norm, seed, condition] for seed in seeds]
                rows[-1] += [summary(group, metric), *(_cell(result, metric) for result in group)]
        lines += [*markdown_table([metric or 'norm', *columns], rows), '']
    return lines


def summary(results: Sequence[dict], metric: str) -> str:
    """Mean and sample standard deviation over the seeds that have the metric, and the status of the others."""
    values = [result['metrics'][metric] for result in results if metric in result['metrics']]
    number = Counter(result['status'] for result in results)
    if number[FAIL] == len(results):
        return FAIL
    if not all(map(math.isfinite, values)):
        return 'not finite'
    text = _number(statistics.mean(values), metric) if values else '-'
    if len(values) > 1:
        text += f' ± {_number(statistics.stdev(values), metric)}'
    others = {FAIL: number[FAIL], 'missing': number[MISSING] + number[ERROR],
              'without it': number[FINISHED] - len(values)}
    rest = [f'{count} {what}' for what, count in others.items() if count]
    return f'{text} ({len(values)} of {len(results)}; {", ".join(rest)})' if rest else text


def _cell(result: dict, metric: str) -> str:
    if result['status'] == FAIL:
        return f'{FAIL} at step {result["step"]}'
    return _number(result['metrics'][metric], metric) if metric in result['metrics'] else '-'


def _number(value: float, metric: str) -> str:
    if not math.isfinite(value):
        return str(value)
    return f'{value:.3f}' if metric.startswith('coco/') else f'{value:.2f}'


def result_notes(results: Results) -> list[str]:
    """Lines below a table: runs that diverged, crashed, or are not finished."""
    lines = [f'- {run}: {result["message"]}' for run, result in results.items() if result['status'] == FAIL]
    lines += [f'- error in {run}: {result["message"]}' for run, result in results.items() if result['status'] == ERROR]
    missing = [str(run) for run, result in results.items() if result['status'] == MISSING]
    if missing:
        lines.append(f'- Not finished yet ({len(missing)} of {len(results)}): {", ".join(missing)}.')
    return lines
