"""The table, the numbers and the picture of a comparison."""
from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..analysis.curves import METRICS, Scalars, curves_figure, read_scalars
from ..analysis.layout import save
from ..utils import whole_file, write_text
from .runs import CALM, ERROR, FAIL, MISSING, ComparedRun


def write_outputs(out: Path, name: str, runs: Sequence[ComparedRun], errors: Mapping[ComparedRun, str],
                  header: str, recipe: str) -> list[Path]:
    """Writes a table (NAME.md), a CSV and a picture of the curves (PNG) of the finished runs into `out`.

    In the CSV, `last_logged_step` is the last step in a finished run's log; the run itself may have gone further.
    `failed_step` is the first bad step of a run that diverged.

    Args:
        out: folder.
        name: name of the files.
        runs: all runs of the comparison, finished or not.
        errors: what went wrong with runs that crashed.
        header: what the table is about, in Markdown.
        recipe: the name of what was trained, for the title of the picture.

    Returns:
        The files, the table first; there is no picture before a run has finished.
    """
    table, numbers, picture = (out / f'{name}.{suffix}' for suffix in ('md', 'csv', 'png'))
    results = {run: run.result() for run in runs}
    metrics = _metrics(results)
    lines = [header.rstrip(), '', *_tables(runs, results, metrics), *_remarks(runs, results, errors)]
    write_text(table, '\n'.join(lines) + '\n')
    with whole_file(numbers) as part, part.open('w', newline='') as file:
        writer = csv.writer(file)
        writer.writerow(['norm', 'condition', 'seed', 'status', 'last_logged_step', 'failed_step',
                         *metrics, 'work_dir'])
        for run in runs:
            result = results[run] or dict(status=ERROR if run in errors else MISSING, step='', metrics={})
            failed = result['status'] == FAIL
            writer.writerow([run.norm, run.condition, run.seed, result['status'],
                             '' if failed else result['step'], result['step'] if failed else '',
                             *(result['metrics'].get(metric, '') for metric in metrics),
                             run.work_dir.relative_to(out)])

    panels: dict = {}
    for run in runs:
        if results[run]:
            panels.setdefault(run.condition, {}).setdefault(run.norm, []).append(_scalars(run))
    if not panels:
        return [table, numbers]
    # A norm keeps its colour in every picture of this comparison, finished or not.
    norms = dict.fromkeys(run.norm for run in runs)
    panels = {condition if list(panels) != [CALM] else '': {norm: groups.get(norm, []) for norm in norms}
              for condition, groups in panels.items()}
    notes = []
    counts = {len(group) for groups in panels.values() for group in groups.values()} - {0}
    if max(counts) > 1:
        number = max(counts) if len(counts) == 1 else f'up to {max(counts)}'
        notes.append(f'A line is the mean of {number} seeds, in a band from the least to the most.')
    if any(result and result['status'] == FAIL for result in results.values()):
        notes.append(f'Runs that diverged ({FAIL}) end where they were stopped.')
    save(curves_figure(panels, ['loss', *metrics], f'Norms compared: {recipe}', notes), picture)
    return [table, numbers, picture]


def _scalars(run: ComparedRun) -> Scalars:
    try:
        return read_scalars(run.work_dir)
    except FileNotFoundError:  # it diverged before its first line
        return {}


def _metrics(results: Mapping[ComparedRun, dict | None]) -> list[str]:
    names = dict.fromkeys(name for result in results.values() if result for name in result['metrics'])
    return [name for name in METRICS if name in names] or list(names)


def _tables(runs, results, metrics) -> list[str]:
    norms, seeds, conditions = (list(dict.fromkeys(values)) for values in zip(
        *((run.norm, run.seed, run.condition) for run in runs), strict=True))
    by_key = {(run.norm, run.seed, run.condition): results[run] for run in runs}
    lines = []
    for metric in metrics or ['']:
        columns = [column for condition in ([''] if conditions == [CALM] else [f'{c}: ' for c in conditions])
                   for column in (f'{condition}mean ± std', *(f'{condition}seed {seed}' for seed in seeds))]
        lines += [f'| {metric or "norm"} | {" | ".join(columns)} |', '|---' * (1 + len(columns)) + '|']
        for norm in norms:
            cells = []
            for condition in conditions:
                group = [by_key[norm, seed, condition] for seed in seeds]
                cells += [summary(group, metric), *(_cell(result, metric) for result in group)]
            lines.append(f'| {norm} | {" | ".join(cells)} |')
        lines.append('')
    return lines


def summary(results: Sequence[dict | None], metric: str) -> str:
    """Mean and sample standard deviation over the seeds that have the metric, and what became of the others."""
    values = [result['metrics'][metric] for result in results if result and metric in result['metrics']]
    failed = sum(result is not None and result['status'] == FAIL for result in results)
    if failed == len(results):
        return FAIL
    if not all(map(math.isfinite, values)):
        return 'not finite'
    text = _number(statistics.mean(values), metric) if values else '-'
    if len(values) > 1:
        text += f' ± {_number(statistics.stdev(values), metric)}'
    missing = sum(result is None for result in results)
    others = {FAIL: failed, 'missing': missing, 'without it': len(results) - len(values) - failed - missing}
    rest = [f'{count} {what}' for what, count in others.items() if count]
    return f'{text} ({len(values)} of {len(results)}; {", ".join(rest)})' if rest else text


def _cell(result: dict | None, metric: str) -> str:
    if result is None:
        return '-'
    if result['status'] == FAIL:
        return f'{FAIL} at step {result["step"]}'
    return _number(result['metrics'][metric], metric) if metric in result['metrics'] else '-'


def _number(value: float, metric: str) -> str:
    if not math.isfinite(value):
        return str(value)
    return f'{value:.3f}' if metric.startswith('coco/') else f'{value:.2f}'


def _remarks(runs, results, errors) -> list[str]:
    lines = [f'- {run}: {results[run]["message"]}' for run in runs
             if results[run] and results[run]['status'] == FAIL]
    lines += [f'- error in {run}: {errors[run]}' for run in runs if run in errors]
    missing = [str(run) for run in runs if results[run] is None and run not in errors]
    if missing:
        lines.append(f'- Not finished yet ({len(missing)} of {len(runs)}): {", ".join(missing)}.')
    return lines
