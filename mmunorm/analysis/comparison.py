"""Runs of one recipe that differ in the norm and the seed: their settings, results, tables and pictures."""
from __future__ import annotations

import ast
import csv
import inspect
import json
import math
import pprint
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import MODELS

from ..engine.divergence import RECORD
from .commands import save
from .curves import METRICS, Scalars, curves_figure, read_scalars

NORMS = {
    'LN': dict(type='LN'),
    'BN': dict(type='TokenBN'),
    'MABN': dict(type='MABN'),
    'PN*': dict(type='PN', layer_scale=False),
    'PN': dict(type='PN', layer_scale=True),
    'UN': dict(type='UN'),
    'UN-nofilter': dict(type='UN', outlier_filter=False),
    'RepBN': dict(type='RepBN'),
    'PRepBN': dict(type='PRepBN'),
    'RMSN': dict(type='RMSN'),
    'DyT': dict(type='DyT'),
    'NoNorm': dict(type='NoNorm'),
}
FINISHED, FAIL, ERROR, MISSING = 'finished', 'FAIL', 'error', 'missing'
CALM, STRESSED = 'calm', 'stressed'
_RESULT = 'result.json'


def parse_norm(text: str) -> tuple[str, dict]:
    """A name of `NORMS`, or `NAME=TYPE,argument=value,...`, as a name and a `norm_cfg`.

    Raises:
        ValueError: neither.
    """
    if '=' not in text:
        if text not in NORMS:
            raise ValueError(f'there is no norm {text!r}: it must be one of {", ".join(NORMS)}, '
                             'or NAME=TYPE,argument=value,...')
        return text, dict(NORMS[text])
    name, _, settings = text.partition('=')
    kind, *arguments = re.split(r',(?![^([]*[)\]])', settings)  # at commas outside brackets
    keys = [argument.partition('=')[0] for argument in arguments if '=' in argument]
    if not name or not kind or len(keys) < len(arguments) or not all(map(str.isidentifier, keys)):
        raise ValueError(f'a norm of your own is NAME=TYPE,argument=value,..., got {text!r}')
    norm_cfg = dict(type=kind)
    for argument in arguments:
        key, _, value = argument.partition('=')
        try:
            norm_cfg[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            norm_cfg[key] = value
    return name, norm_cfg


def complete_norm_cfg(norm_cfg: dict, base: Mapping, steps: int) -> dict:
    """`norm_cfg` with the arguments that go with the recipe.

    A norm of the type that the base config has, UN as a rule, inherits its arguments. A norm of another type
    keeps its own defaults, which are those of its paper but for MABN's `alpha` (0.9 as in UN's comparison,
    where its paper has 0.98); yet it inherits `warmup_iters`, which goes with the recipe. Two arguments that
    depend on the length of the run are set where nobody has: `warmup_iters` to a tenth of it, and the `steps`
    over which PRepBN fades LayerNorm out to half.

    Args:
        norm_cfg: type, and arguments that stay as they are.
        base: the base config's `norm_cfg`.
        steps: training steps of the run.

    Raises:
        ValueError: there is no such type.
    """
    cls = MODELS.get(norm_cfg['type'])
    if cls is None:
        raise ValueError(f'there is no norm of type {norm_cfg["type"]!r} among the registered layers')
    recipe = dict(warmup_iters=max(1, steps // 10), steps=max(1, steps // 2))
    if norm_cfg['type'] == base['type']:
        recipe.update(base)
    elif 'warmup_iters' in base:
        recipe['warmup_iters'] = base['warmup_iters']
    accepted = inspect.signature(cls).parameters
    return {**{key: value for key, value in recipe.items() if key in accepted}, **norm_cfg}


@dataclass(frozen=True)
class Run:
    """One training run of a comparison.

    It lies in `OUT/NORM/seed_K/`, a stressed one in `OUT/stressed/NORM/seed_K/`; its config is the `.py`
    file of the same name beside that folder.
    """
    out: Path
    norm: str
    seed: int
    condition: str = CALM

    @property
    def work_dir(self) -> Path:
        folder = self.out / STRESSED if self.condition == STRESSED else self.out
        return folder / slug(self.norm) / f'seed_{self.seed}'

    @property
    def config(self) -> Path:
        return self.work_dir.with_suffix('.py')

    @property
    def log(self) -> Path:
        return self.work_dir / 'output.log'

    def __str__(self) -> str:
        stressed = f'{STRESSED} ' if self.condition == STRESSED else ''
        return f'{stressed}{self.norm} seed {self.seed}'

    def result(self) -> dict | None:
        """The file of a finished run: `status` (FINISHED or FAIL), `step`, `metrics`, `message`; or None."""
        try:
            return json.loads((self.work_dir / _RESULT).read_text())
        except FileNotFoundError:
            return None

    def close(self, returncode: int) -> dict | None:
        """Writes the result of a run whose process has ended; None if it crashed or was interrupted.

        Without a log, or with a metric that was last measured before the last step, which is that of an
        interrupted validation, the run is not finished, whatever its status: it can be resumed.
        """
        if (self.work_dir / RECORD).exists():
            record = json.loads((self.work_dir / RECORD).read_text())
            result = dict(status=FAIL, step=record['step'], metrics={}, message=record['message'])
        elif returncode == 0:
            try:
                scalars = read_scalars(self.work_dir)
            except FileNotFoundError:
                return None
            if not scalars:
                return None
            last = max(int(values[-1, 0]) for values in scalars.values())
            # NormStatisticsHook's numbers are of training.
            measured = {name: values[-1] for name, values in scalars.items()
                        if '/' in name and not name.startswith('norm/')}
            if any(step < last for step, _ in measured.values()):
                return None
            metrics = {name: float(value) for name, (_, value) in measured.items()}
            result = dict(status=FINISHED, step=last, metrics=metrics, message='')
        else:
            return None
        temporary = self.work_dir / f'{_RESULT}.part'
        temporary.write_text(json.dumps(result, indent=1))
        temporary.replace(self.work_dir / _RESULT)
        return result


def slug(norm: str) -> str:
    """A norm's name as that of a folder."""
    return re.sub(r'[^a-z0-9.-]+', '_', norm.lower().replace('*', '_star'))


def config_text(cfg: Config) -> str:
    """A merged config as a Python file that stands alone."""
    return ''.join(f'{key} = {pprint.pformat(value, width=110, sort_dicts=False)}\n'
                   for key, value in cfg.to_dict().items())


def differing_keys(one: Mapping, other: Mapping) -> list[str]:
    """The dotted names of the settings in which two configs differ."""
    one, other = dict(_leaves(one)), dict(_leaves(other))
    return sorted(key for key in one.keys() | other.keys() if one.get(key, ...) != other.get(key, ...))


def _leaves(value, key: str = ''):
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, inner in items:
        if isinstance(inner, (Mapping, list, tuple)) and inner:
            yield from _leaves(inner, f'{key}{name}.')
        else:
            yield f'{key}{name}', inner


def write_outputs(out: Path, name: str, runs: Sequence[Run], errors: Mapping[Run, str],
                  header: str, recipe: str) -> list[Path]:
    """Writes a table (NAME.md), a CSV and a picture of the curves (PNG) of the finished runs into `out`.

    In the CSV `last_logged_step` is that of a finished run's log, which need not be its last one, and
    `failed_step` the first bad step of a run that diverged.

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
    table.write_text('\n'.join(lines) + '\n')
    with numbers.open('w', newline='') as file:
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


def _scalars(run: Run) -> Scalars:
    try:
        return read_scalars(run.work_dir)
    except FileNotFoundError:  # it diverged before its first line
        return {}


def _metrics(results: Mapping[Run, dict | None]) -> list[str]:
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
    """Mean and sample standard deviation over the seeds that have the metric, and what of the others."""
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
