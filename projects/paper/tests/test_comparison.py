import csv
import json
import math
import statistics

import pytest
from matplotlib.figure import Figure
from mmengine.config import Config

from projects.paper.paper.results import write_norms
from projects.paper.paper.runs import STRESSED, ComparedRun, config_text, differing_keys

from .logs import train, write_log


def finish(run, **metrics):
    """Numbers of training are no metrics, which would have to be measured after the last step."""
    write_log(run.work_dir, '1', [{**train(10, 2.0), 'norm/outlier_share': 0.1}, train(20, 1.0),
                                  {**metrics, 'step': 1}])
    return run.close(0)


def top1(value):
    return {'accuracy/top1': value}


def fail(run, step):
    run.work_dir.mkdir(parents=True)
    (run.work_dir / 'divergence.json').write_text(json.dumps(dict(step=step, message='the run diverged: why')))
    return run.close(3)


def write(out, runs, errors=None):
    """The text of the table, and its rows by their first cell."""
    write_norms(out, 'comparison', runs, errors or {}, '# Header', 'some_config.py')
    text = (out / 'comparison.md').read_text()
    rows = [line.strip('| ').split(' | ') for line in text.splitlines() if line.startswith('|')]
    return text, {name: cells for name, *cells in rows}


def test_table_of_some_finished_some_failed_and_some_missing(tmp_path):
    runs = [ComparedRun(tmp_path, norm, seed) for norm in ('LN', 'UN', 'BN', 'PN*', 'DyT') for seed in range(3)]
    values = (80.0, 81.0, 83.0)
    for run, value in zip(runs[:4], (*values, 90.0), strict=True):
        assert finish(run, **top1(value))['status'] == 'finished'
    fail(runs[4], 17)
    for run in runs[9:12]:
        fail(run, 5)
    text, table = write(tmp_path, runs, {runs[6]: 'it crashed, see LOG'})
    assert text.startswith('# Header\n')
    assert table['accuracy/top1'] == ['mean ± std', 'seed 0', 'seed 1', 'seed 2']
    assert table['LN'] == [f'81.33 ± {statistics.stdev(values):.2f}', '80.00', '81.00', '83.00']
    assert table['UN'] == ['90.00 (1 of 3; 1 FAIL, 1 missing)', '90.00', 'FAIL at step 17', '-']
    assert table['BN'] == ['- (0 of 3; 3 missing)', '-', '-', '-']
    assert table['PN*'] == ['FAIL', *['FAIL at step 5'] * 3]
    assert '- UN seed 1: the run diverged: why' in text
    assert '- error in BN seed 0: it crashed, see LOG' in text
    missing = ['UN seed 2', 'BN seed 1', 'BN seed 2', 'DyT seed 0', 'DyT seed 1', 'DyT seed 2']
    assert f'Not finished yet (6 of 15): {", ".join(missing)}.' in text

    lines = list(csv.DictReader((tmp_path / 'comparison.csv').open()))
    assert len(lines) == 15
    assert lines[1] == {'norm': 'LN', 'condition': 'calm', 'seed': '1', 'status': 'finished',
                        'last_logged_step': '20', 'failed_step': '',
                        'accuracy/top1': '81', 'work_dir': 'ln/seed_1'}
    assert [(line['status'], line['last_logged_step'], line['failed_step']) for line in lines[3:7]] == [
        ('finished', '20', ''), ('FAIL', '', '17'), ('missing', '', ''), ('error', '', '')]


def test_calm_and_stressed_runs_and_two_metrics(tmp_path):
    runs = [ComparedRun(tmp_path, 'LN', 0), ComparedRun(tmp_path, 'LN', 0, STRESSED)]
    finish(runs[0], **{'coco/bbox_mAP': 0.5, 'coco/bbox_mAP_50': 0.7, 'coco/segm_mAP': 0.25})
    fail(runs[1], 3)
    text, _ = write(tmp_path, runs)
    assert ('| coco/bbox_mAP | calm: mean ± std | calm: seed 0 | stressed: mean ± std | stressed: seed 0 |'
            in text)
    assert '| LN | 0.500 | 0.500 | FAIL | FAIL at step 3 |' in text
    assert '| LN | 0.250 | 0.250 | FAIL | FAIL at step 3 |' in text
    assert 'mAP_50' not in text
    assert runs[1].work_dir == tmp_path / 'stressed/ln/seed_0'
    assert (tmp_path / 'comparison.png').read_bytes().startswith(b'\x89PNG')


def test_the_image_says_what_it_shows(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, *_, **__: drawn.append(figure))
    runs = [ComparedRun(tmp_path, norm, seed) for norm in ('LN', 'UN') for seed in range(2)]
    for run, value in ((runs[0], 80.0), (runs[1], 90.0)):
        finish(run, **top1(value))
        write(tmp_path, runs)
    finish(runs[2], **top1(70.0))
    fail(runs[3], 5)
    stressed = [ComparedRun(tmp_path, run.norm, run.seed, STRESSED) for run in runs]
    finish(stressed[0], **top1(60.0))
    write(tmp_path, [*runs, *stressed])
    assert drawn[0].get_suptitle() == 'Norms compared: some_config.py'
    band = 'A line is the mean of {} seeds, with a band from minimum to maximum.'
    assert drawn[1].get_suptitle().splitlines()[1:] == [band.format(2)]
    assert drawn[2].get_suptitle().splitlines()[1:] == [
        band.format('up to 2'), 'Runs that diverged (FAIL) end where they were stopped.']
    assert [axes.get_title() for axes in drawn[0].axes] == ['loss', 'top-1 accuracy (%)']
    assert [axes.get_title() for axes in drawn[2].axes] == [
        'calm: loss', 'calm: top-1 accuracy (%)', 'stressed: loss', 'stressed: top-1 accuracy (%)']
    assert [line.get_xydata().tolist() for line in drawn[1].axes[1].lines] == [[[20, 85]]]
    assert [text.get_text() for text in drawn[2].legends[0].get_texts()] == ['LN', 'UN']


@pytest.mark.parametrize('metrics, cells', [
    (top1(math.nan), ['not finite', 'nan', '50.00']), (dict(f1=1.0), ['50.00 (1 of 2; 1 without it)', '-', '50.00'])])
def test_a_metric_that_is_not_finite_or_not_there(tmp_path, metrics, cells):
    runs = [ComparedRun(tmp_path, 'LN', seed) for seed in (0, 1)]
    for run, found in zip(runs, (metrics, top1(50.0)), strict=True):
        finish(run, **found)
    assert write(tmp_path, runs)[1]['LN'] == cells


def test_a_run_without_its_last_validation_is_not_finished(tmp_path):
    run = ComparedRun(tmp_path, 'LN', 0)
    assert run.close(0) is None  # without a log
    write_log(run.work_dir, '0', [])
    assert run.close(0) is None
    write_log(run.work_dir, '1', [train(10, 2.0), {'accuracy/top1': 20.0, 'step': 1}, train(20, 1.0)])
    assert run.close(0) is None and run.result() is None
    assert 'Not finished yet (1 of 1)' in write(tmp_path, [run])[0]
    assert (tmp_path / 'comparison.csv').exists() and not (tmp_path / 'comparison.png').exists()
    # The validation that the resumed run does at its end.
    write_log(run.work_dir, '2', [{'accuracy/top1': 40.0, 'step': 2}])
    assert run.close(-15) is None  # it was interrupted
    assert run.close(0)['metrics'] == {'accuracy/top1': 40.0}


def test_configs_are_written_and_compared(tmp_path):
    cfg = Config(dict(model=dict(type='A', shape=(3, 4), inner=[dict(a=None, b=1e-5)]), lr=0.1, name="it's"))
    path = tmp_path / 'config.py'
    path.write_text(config_text(cfg))
    assert Config.fromfile(path).to_dict() == cfg.to_dict()
    one = dict(a=dict(b=[1, dict(c=2)]), same=1, gone=())
    other = dict(a=dict(b=[1, dict(c=3)]), same=1, new=None)
    assert differing_keys(one, other) == ['a.b.1.c', 'gone', 'new']
