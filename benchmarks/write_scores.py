"""Writes the tables with measured numbers in README, docs/, projects/ and configs/ from the rows in results/.

    python benchmarks/write_scores.py                                                  # the tables, from the data
    python benchmarks/write_scores.py --add work_dirs/compare/swin --experiment swin   # new trainings first

score_tables.py defines the tables of training scores, whose data is scores.jsonl with a row per training; row_tables.py
all others. In a page, a table is between `<!-- scores: NAME -->` and `<!-- /scores -->`.
`--add` adds the finished runs of compare_norms.py or of conversion.py, and replaces rows of the same training. Run it
on the machine of the trainings, because the rows name its CPU.
"""
import argparse
import csv
import json
import re
import shlex
import statistics
import sys
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path

from mmunorm.benchmark.environment import device_name
from mmunorm.config.presets import NORMS, slug
from mmunorm.tables import markdown_table
from mmunorm.utils import write_text
from projects.paper.paper.runs import FAIL, STRESSED

import torch
from mmengine.config import Config

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

from row_tables import ROW_TABLES  # noqa: E402
from score_tables import TABLES  # noqa: E402

DATA = ROOT / 'benchmarks/results/scores.jsonl'
# Written by int8.py and shifted_light.py: the same trainings in INT8, and on modified images.
BY_FORM = ('exact_int8', 'int8', 'int8_litert', 'int8_wide_start', 'int8_executorch', 'int8_t2t', 'int8_detector_full',
           'int8_exact_digits', 'int8_exact_detector', 'shifted_light')
PAGES = [ROOT / 'README.md', ROOT / 'benchmarks/NOTES.md',
         *sorted(page for folder in ('docs', 'projects', 'configs') for page in ROOT.glob(f'{folder}/**/*.md'))]
MARKED = re.compile(r'(<!-- scores: (\S+) -->\n).*?(<!-- /scores -->)', re.DOTALL)
# The fields that identify a training.
IDENTITY = ('experiment', 'norm', 'settings', 'options', 'seed', 'steps', 'cpu', 'precision')
BFLOAT16 = ('BFloat16OptimWrapper', 'AmpOptimWrapper')  # on a CPU, both are bfloat16


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def load():
    """The data of the tables."""
    rows = [dict(row, experiment=name, kind=row['form'], options={}) for name in BY_FORM
            for row in read(DATA.with_name(f'{name}.jsonl'))]
    for row in rows:
        found = {key: row[key] for key in ('snr', 'simulated') if row.get(key) is not None}
        row['metrics'] = {**row.get('metrics', {}), **found}
    return read(DATA) + rows


def matches(row, wanted):
    """Whether a row has these values, in its fields or its options."""
    return all({**row['options'], **row}.get(key) == value for key, value in wanted.items())


def scores(rows, metric):
    """The metric of each training that has it."""
    return [row['metrics'][metric] for row in rows if metric in row.get('metrics', ())]


def summary(rows, metric):
    """Mean, sample standard deviation (None of one seed) and number of seeds; None if no training has the metric."""
    if values := scores(rows, metric):
        return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None, len(values)
    lost = [row for row in rows if metric in row.get('mean', ())]
    if not lost:
        return None
    row, = lost  # a summary instead of single seeds
    return row['mean'][metric], row['std'][metric], row['seeds']


def cell(rows, metric, form='mean', digits=2, missing='not run'):
    """The cell of a table for these trainings.

    'mean' is the mean and the sample standard deviation, 'count' adds the number of seeds.
    """
    failed = [row for row in rows if 'failed_step' in row]
    if (found := summary(rows, metric)) is not None:
        mean, spread, count = found
    elif failed:
        return f'{FAIL} at step {failed[0]["failed_step"]}' if len(failed) == 1 else f'{FAIL} ({len(failed)})'
    else:
        return missing
    text = f'{mean:.{digits}f}' + ('' if spread is None else f' ± {spread:.{digits}f}')
    others = f', {len(failed)} {FAIL}' if failed else ''
    return f'{text} ({count}{others})' if form == 'count' or others else text


def select(data, *wanted):
    """The trainings with the values of a table, a row and a column; later values replace earlier ones."""
    values = {key: value for part in wanted for key, value in part.items()}
    return [row for row in data if matches(row, values)]


def split_column(column):
    """The arguments of `cell`, and the values that select trainings."""
    form = {key: column[key] for key in ('metric', 'form', 'digits', 'missing') if key in column}
    return form, {key: value for key, value in column.items() if key not in form}


def table(name, data):
    """A table in Markdown."""
    header, rows = ROW_TABLES[name]() if name in ROW_TABLES else score_rows(TABLES[name], data)
    return '\n'.join(markdown_table(header, [list(map(str, cells)) for cells in rows])) + '\n'


def score_rows(spec, data):
    """The header and the rows of a table of training scores."""
    rows = []
    for label, wanted in spec['rows'].items():
        wanted, cells = dict(wanted), []
        measured = wanted.pop('measured', {})
        for column in spec['columns'].values():
            form, rest = split_column({**measured, **column})
            cells.append(cell(select(data, spec['where'], wanted, rest), **form))
        rows.append([*(label if isinstance(label, tuple) else (label, )), *cells])
    return [*spec['labels'], *spec['columns']], rows


def update_tables(text, data):
    """A page with its tables updated from the data."""
    return MARKED.sub(lambda match: match[1] + table(match[2], data) + match[3], text)


def training_info(run):
    """Information on a training from the files of its run."""
    cfg = Config.fromfile(run.with_suffix('.py'))
    log = sorted(run.glob('*/*.log'))[-1].read_text()
    steps = cfg.train_cfg.get('max_iters') or cfg.train_cfg.max_epochs * int(
        re.search(r'Epoch\(train\)\s+\[\d+\]\[\s*\d+/(\d+)\]', log)[1])
    return dict(
        settings=json.loads(json.dumps(cfg.model.backbone.norm_cfg)), seed=cfg.randomness.seed, steps=steps,
        cpu=f'{device_name(torch.device("cpu"))}, {re.search(r"CPU capability usage: (.*)", log)[1]}',
        precision='bfloat16' if cfg.optim_wrapper.type in BFLOAT16 else 'float32',
        date=datetime.fromtimestamp((run / 'result.json').stat().st_mtime, timezone.utc).date().isoformat())


def round_metrics(metrics):
    return {key: round(float(value), 4) for key, value in metrics.items()}


def comparison_rows(out):
    """The rows of the finished runs of projects/paper/tools/compare_norms.py."""
    names = {slug(name): name for name in NORMS}
    for file in sorted(out.glob('**/seed_*/result.json')):
        run, result = file.parent, json.loads(file.read_text())
        stressed = run.parents[1].name == STRESSED
        title, _, command = (out / f'{"stress" if stressed else "comparison"}.md').read_text().splitlines()[:3]
        words = [*shlex.split(command.strip('`')), '--cfg-options']
        given = takewhile(lambda word: not word.startswith('--'), words[words.index('--cfg-options') + 1:])
        options = dict(word.split('=', 1) for word in given)
        options.pop('optim_wrapper.type', None)  # is `precision`
        yield dict(config=title.rpartition(' ')[2], norm=names.get(run.parent.name, run.parent.name),
                   options={**options, 'condition': STRESSED} if stressed else options,
                   metrics=round_metrics(result['metrics']), **training_info(run),
                   **({'failed_step': result['step']} if result['status'] == FAIL else {}))


def conversion_rows(out):
    """The rows of the runs of conversion.py, by way and condition of the test."""
    found = {}
    with (out / 'conversion.csv').open() as file:
        for row in csv.DictReader(file):
            if row['metric'] != 'norms' and not row['way'].endswith('from scratch'):
                found.setdefault((row['way'], row['seed'], row['condition']), {})[row['metric']] = row['value']
    for (way, seed, condition), metrics in found.items():
        training = training_info(out / slug(way) / f'seed_{seed}')
        if condition == 'untrained':
            training['steps'] = 0
        task = 'classifier' if 'accuracy/top1' in metrics else 'maskrcnn'
        yield dict(config=f'projects/digits/configs/swin_un_{task}_converted.py', norm=training['settings']['type'],
                   options=dict(way=way, condition=condition), metrics=round_metrics(metrics), **training)


def merge_rows(data, rows):
    """All rows; new rows replace rows of the same training."""
    def identity(row):
        return json.dumps([row.get(key) for key in IDENTITY], sort_keys=True)

    return list({identity(row): row for row in [*data, *rows]}.values())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--add', type=Path, metavar='OUT', help='folder that compare_norms.py or conversion.py wrote')
    parser.add_argument('--experiment', help='name of these trainings in the data: swin, t2t, maskrcnn, '
                        'conversion, conversion_detector, or a new name')
    args = parser.parse_args(argv)
    if (args.add is None) != (args.experiment is None):
        parser.error('--add and --experiment must be given together')
    if args.add:
        runs = (conversion_rows if (args.add / 'conversion.csv').exists() else comparison_rows)(args.add)
        rows = [dict(experiment=args.experiment, **run) for run in runs]
        write_text(DATA, ''.join(json.dumps(row) + '\n' for row in merge_rows(read(DATA), rows)))
        print(f'{len(rows)} runs of {args.add} added to {DATA}')
    data = load()
    for page in PAGES:
        text = page.read_text()
        if (new := update_tables(text, data)) != text:
            write_text(page, new)
            print(f'{page} has changed')


if __name__ == '__main__':
    main()
