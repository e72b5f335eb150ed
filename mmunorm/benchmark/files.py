"""Speed, size and metrics of a model in torch and in the runtimes, with an optional baseline."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import torch

from ..deploy.formats import FORMATS, VARIANTS
from ..deploy.runtime import ExportedModel
from ..tables import markdown_table
from ..utils import PreflightError
from .environment import environment
from .measure import InterleavedTimer, ratio, speed
from .output import quartiles, speed_cell, speedup
from .subjects import Subject
from .workers import Worker

COLUMNS = ('model', 'format', 'metrics', 'images/s (quartiles)', 'ms/batch', 'MB')


def measure_formats(subjects: Sequence[Subject], formats: Sequence[str], arrays: Sequence[np.ndarray],
                    metrics_of: Callable[[Subject, ExportedModel, str], dict[str, float]],
                    repeat: int | None = None) -> dict:
    """Measures models in several forms, each in a separate process: first the metrics, then speed in rotation.

    Of two subjects, the first is the baseline of the second. `formats` are keys of `VARIANTS`, `arrays` one batch of
    the models' batch size, and `metrics_of` returns the metrics of a subject, its runner and a title. `repeat` is the
    number of rounds, in each of which every row runs the batch; by default as many as fit in 45 s.

    Returns a dict of plain values: `batch`, `shape`, `threads`, `repeat`, `environment`, and `rows`. Each row has
    `model`, `format`, `label` and `error` (a message, or None). Without an error it also has `metrics`, `size` (bytes),
    `seconds` (of each round), and the results of :func:`speed`. A row of the second subject has `to_baseline`, the
    :func:`ratio` of the first one's time to its own. `control` has `model`, `label` and `ratio` of the last row to a
    second process with the same file, or is None.
    """
    rows, workers, last = [], {}, None
    with ExitStack() as stack:
        for subject in subjects:
            for name in formats:
                row = dict(model=subject.name, format=name, label=VARIANTS[name][1].label, error=None)
                rows.append(row)
                try:
                    opener, row['size'] = subject.export(name)
                    worker = stack.enter_context(closing(Worker(opener)))
                except PreflightError as error:
                    row['error'] = str(error)
                    continue
                workers[subject.name, name], last, last_opener = worker, row, opener
                row['metrics'] = metrics_of(subject, ExportedModel(worker), f'{subject.name}, {row["label"]}')
        if last:  # the same file once more
            workers['control'] = stack.enter_context(closing(Worker(last_opener)))
        timer = InterleavedTimer({key: partial(worker.seconds, *arrays) for key, worker in workers.items()},
                                 torch.device('cpu'), clock=None)
        timer.time(2, 'warming up')
        seconds = timer.time(repeat, 'measuring')

    batch, _, *shape = subjects[0].exportable.meta['shape']
    for row in rows:
        if row['error'] is not None:
            continue
        times = row['seconds'] = seconds[row['model'], row['format']]
        row.update(speed(times, batch))
        if row['model'] != subjects[0].name and (base := seconds.get((subjects[0].name, row['format']))):
            row['to_baseline'] = ratio(base, times)
    control = None
    if last:
        control = dict(model=last['model'], label=last['label'], ratio=ratio(last['seconds'], seconds['control']))
    packages = [name for chosen in FORMATS.values() for name in chosen.run_packages if find_spec(name)]
    return dict(
        title=subjects[-1].name, baseline=subjects[0].name if len(subjects) > 1 else None, batch=batch, shape=shape,
        threads=subjects[0].threads, repeat=max(map(len, seconds.values()), default=0),
        environment=environment(torch.device('cpu')) | dict(runtimes={name: version(name) for name in packages}),
        rows=rows, control=control)


def markdown(result: dict) -> str:
    """A result of :func:`measure_formats` as Markdown: title, notes and the table."""
    env, baseline = result['environment'], result['baseline']
    columns = [*COLUMNS, *([f'x {baseline}'] if baseline else [])]
    runtimes = ', '.join(f'{name} {number}' for name, number in
                         (env['runtimes'] | dict(torch=env['versions']['torch'])).items())
    lines = [
        f'# {result["title"]}: formats', '',
        f'- Batches of {result["batch"]}, {result["shape"][0]} x {result["shape"][1]} pixels; '
        f'{env["cpu"]} ({" ".join(env["instructions"]) or "instructions unknown"}), threads: {result["threads"]}; '
        f'{runtimes}.',
        f'- Each row runs in its own process, one row at a time, for {result["repeat"]} rounds in rotating order. In '
        'each round it runs two batches, and the second is timed. Speed is the median with its quartiles.',
        '- Every row computes boxes or probabilities from pixels; masks are not pasted. For torch, MB is the size of '
        'the weights in memory, else of the files.']
    if baseline:
        lines.append(f'- x {baseline}: its median time over this one in the same format; in brackets the quartiles of '
                     'single rounds.')
    if control := result['control']:
        lines.append(f'- Control: {control["model"]}, {control["label"]} in two rows, first over second: '
                     f'{quartiles(control["ratio"])}. Smaller differences between rows are not significant.')
    lines += ['', *markdown_table(columns, [_cells(row, control and control['ratio']) for row in result['rows']])]
    return '\n'.join(lines) + '\n'


def main_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that a table shows: each mAP, or else the first."""
    chosen = {name: value for name, value in metrics.items() if name.endswith('mAP')}
    return chosen or dict(list(metrics.items())[:1])


def _cells(row: dict, control: dict[str, float] | None) -> list[str]:
    cells = [row['model'], row['label']]
    if row['error'] is not None:
        return [*cells, row['error']]
    metrics = main_metrics(row['metrics'])
    cells += [', '.join(f'{name.rpartition("/")[2]} {value:.4g}' for name, value in metrics.items()),
              speed_cell(row['throughput']), f'{row["latency_ms"]["median"]:.4g}', f'{row["size"] / 1e6:.3g}']
    return [*cells, speedup(row['to_baseline'], control)] if 'to_baseline' in row else cells
