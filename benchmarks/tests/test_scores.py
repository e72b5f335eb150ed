"""The tables of measured numbers are what benchmarks/write_scores.py writes from the rows."""
import importlib
import json
import re

from tests import tiny_runs

import pytest

ALWAYS = {'experiment', 'config', 'norm', 'settings', 'options', 'steps', 'cpu', 'precision', 'date'}
ROOT = tiny_runs.ROOT
# Pages whose scores are all in marked tables; the one of photographs also has means in its text.
PAGES = sorted(str(page.relative_to(ROOT)) for folder in ('docs', 'projects', 'configs')
               for page in ROOT.glob(f'{folder}/**/*.md') if page.parent.name != 'photographs')
CPU = 'CPU capability usage: AVX2\n'


@pytest.fixture
def scores(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'benchmarks')
    return importlib.import_module('write_scores')


def test_tables_are_those_of_the_data(scores):
    data, names = scores.load(), []
    for page in scores.PAGES:
        text = page.read_text()
        assert scores.update_tables(text, data) == text, f'{page}: call python benchmarks/write_scores.py'
        names += [match[2] for match in scores.MARKED.finditer(text)]
        assert text.count('<!-- scores:') == len(scores.MARKED.findall(text)), page
    assert sorted(names) == sorted([*scores.TABLES, *scores.ROW_TABLES])


@pytest.mark.parametrize('page', PAGES)
def test_means_are_only_in_tables_of_the_data(scores, page):
    assert not re.search(r'\d\** ± \d', scores.MARKED.sub('', (ROOT / page).read_text()))


def test_rows(scores):
    rows = scores.read(scores.DATA)
    assert len(rows) > 300
    for row in rows:
        found = set(row) - ALWAYS - {'failed_step'}
        assert set(row) >= ALWAYS and found in ({'seed', 'metrics'}, {'runs', 'seeds', 'mean', 'std'}), row
        assert (ROOT / row['config']).is_file() and re.fullmatch(r'20\d\d-\d\d-\d\d', row['date']), row
        assert row.get('metrics') or row.get('mean') or row['failed_step'], row
    assert len(scores.merge_rows([], rows)) == len(rows), 'a training stands twice'


def row(seed, value=None, **fields):
    return dict(options={}, seed=seed, metrics={} if value is None else {'accuracy/top1': value}, **fields)


def test_cells(scores):
    cell, two, failed = scores.cell, [row(0, 80.0), row(1, 82.0)], row(2, failed_step=7)
    assert cell(two, 'accuracy/top1') == '81.00 ± 1.41'
    assert cell(two, 'accuracy/top1', digits=1) == '81.0 ± 1.4'
    assert cell([*two, failed], 'accuracy/top1', 'count') == '81.00 ± 1.41 (2, 1 FAIL)'
    assert cell([*two, failed], 'accuracy/top1') == '81.00 ± 1.41 (2, 1 FAIL)'
    assert cell(two[:1], 'accuracy/top1', 'count') == '80.00 (1)'
    assert cell([failed], 'accuracy/top1') == 'FAIL at step 7'
    assert cell([failed] * 3, 'accuracy/top1', 'count') == 'FAIL (3)'
    assert cell([], 'accuracy/top1') == 'not run'
    lost = dict(options={}, runs='lost', seeds=3, mean={'accuracy/top1': 81.0}, std={'accuracy/top1': 1.5})
    assert cell([lost], 'accuracy/top1', 'count') == '81.00 ± 1.50 (3)'
    assert cell([lost, *two], 'accuracy/top1', 'count') == '81.00 ± 1.41 (2)', 'trained again'


def write_run(out, folder, seed, result, cfg=''):
    run = out / folder / f'seed_{seed}'
    (run / '2026').mkdir(parents=True)
    (run / 'result.json').write_text(json.dumps(result))
    (run / '2026/2026.log').write_text(f'{CPU}Epoch(train)  [1][20/94]  lr: 1\n')
    run.with_suffix('.py').write_text(
        f"randomness = dict(seed={seed})\ntrain_cfg = dict(max_epochs=8)\noptim_wrapper = dict(type='OptimWrapper')\n"
        f"model = dict(backbone=dict(norm_cfg=dict(type='UN', window=4)))\n{cfg}")


def test_runs_are_added_once(scores, tmp_path):
    """Writes the files of compare_norms.py for a run: finished, diverged or stressed."""
    command = 'projects/paper/tools/compare_norms.py configs/x.py --norms UN+ m=UN,window=2'
    (tmp_path / 'comparison.md').write_text(f'# Norms compared: configs/x.py\n\n`python {command}`\n')
    command += ' --stress --cfg-options optim_wrapper.type=OptimWrapper train_cfg.max_epochs=8 --jobs 2'
    (tmp_path / 'stress.md').write_text(f'# Norms compared: configs/x.py\n\n`python {command}`\n')
    write_run(tmp_path, 'un_plus', 0, dict(status='finished', step=738, metrics={'accuracy/top1': 89.4000015}))
    write_run(tmp_path, 'un_plus', 1, dict(status='FAIL', step=77, metrics={}))
    write_run(tmp_path, 'stressed/m', 0, dict(status='finished', step=738, metrics={'accuracy/top1': 50.0}),
              "optim_wrapper = dict(type='BFloat16OptimWrapper')\n")
    (tmp_path / 'un_plus/seed_2').mkdir()  # is still training
    stressed, first, failed = (dict(experiment='mine', **run) for run in scores.comparison_rows(tmp_path))
    assert first['config'] == 'configs/x.py' and first['norm'] == 'UN+'
    assert first['settings'] == dict(type='UN', window=4) and first['options'] == {}
    assert (first['seed'], first['steps'], first['precision']) == (0, 752, 'float32')
    assert first['metrics'] == {'accuracy/top1': 89.4} and first['cpu'].endswith(', AVX2')
    assert failed['failed_step'] == 77 and failed['metrics'] == {}
    assert stressed['norm'] == 'm' and stressed['precision'] == 'bfloat16'
    assert stressed['options'] == {'condition': 'stressed', 'train_cfg.max_epochs': '8'}
    again = {**first, 'metrics': {'accuracy/top1': 90.0}, 'date': '2027-01-01'}
    assert scores.merge_rows([first, failed], [again, {**first, 'cpu': 'another'}]) == [
        again, failed, {**first, 'cpu': 'another'}]


def test_conversions_are_added(scores, tmp_path):
    write_run(tmp_path, 'affine_teacher', 0, {}, 'train_cfg = dict(max_iters=188)\n')
    (tmp_path / 'conversion.csv').write_text(
        'way,seed,condition,metric,value\n"LN, from scratch",0,trained,accuracy/top1,88.0\n'
        '"affine, teacher",0,untrained,accuracy/top1,88.0\n"affine, teacher",0,folded,accuracy/top1,85.5\n'
        '"affine, teacher",0,folded,norms,0\n')
    untrained, folded = scores.conversion_rows(tmp_path)
    assert untrained['options'] == {'way': 'affine, teacher', 'condition': 'untrained'} and untrained['steps'] == 0
    assert folded['metrics'] == {'accuracy/top1': 85.5} and folded['steps'] == 188 and folded['norm'] == 'UN'
    assert folded['config'] == 'projects/digits/configs/swin_un_classifier_converted.py'


@pytest.fixture
def drawing(scores):
    return importlib.import_module('draw_scores')


def test_a_figure_has_the_scores_of_its_table(drawing):
    data = drawing.load()
    for name, (table, _, by_metric) in drawing.FIGURES.items():
        figure = drawing.figure_of(name, data)
        assert len(figure.axes) == len(by_metric)
        for axes in figure.axes:
            assert len(axes.get_yticks()) == len(drawing.TABLES[table]['rows']) and axes.get_xlabel()
    titles = [axes.get_title() for axes in drawing.depth_figure(data).axes]
    assert titles[3:] == ['BranchNorm, T = 25', 'BranchNorm, T = 100', 'LayerScale']
    for figure, forms, groups in ((drawing.snr_figure(data), ['LN', 'exact'], 3),
                                  (drawing.speed_figure(data), ['LN', 'exact', 'UN'], 4)):
        axes, = figure.axes
        assert [bars.get_label() for bars in axes.containers] == forms and len(axes.get_yticks()) == groups
