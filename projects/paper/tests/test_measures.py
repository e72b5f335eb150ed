import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import gmean, normaltest

from projects.paper.paper import NormRecord, RecordError, measures
from projects.paper.paper.figures import short_name
from projects.paper.paper.work_dirs import distinct_names, find_record, run_names

from .records import NAMES, write_record


@pytest.fixture
def record(tmp_path):
    return NormRecord(write_record(tmp_path) / 'norm_statistics')


def test_pnac_of_a_record_is_scipys(record):
    measure = measures.measure_pnac(record, span=25)
    assert measure.first.tolist() == [1, 36] and measure.last.tolist() == [25, 60]
    percent = measure.percent('activation')
    for row, rows in enumerate((slice(0, 25), slice(35, 60))):
        for layer in (0, 1):
            p = normaltest(record.activation(layer)[rows].astype(float)).pvalue
            assert percent[row, layer] == pytest.approx(100 * (p > 0.05).mean())
    assert np.isnan(percent[:, 2]).all()
    np.testing.assert_allclose(measure.mean('activation'), percent[:, :2].mean(axis=1))
    np.testing.assert_array_equal(measures.finite_mean(np.array([[np.nan, np.inf], [np.inf, 3]]), axis=1), [np.nan, 3])
    assert len(list(measure.rows('run'))) == 2 * 2 * 3
    notes = ' '.join(measure.notes())
    assert NAMES[2] in notes and '60 sequences' in notes
    assert '2 spans of 25 recorded steps; the 10 before the last span are in none.' in notes
    assert measures.measure_pnac(record).notes()[0] == '1 span of 60 recorded steps.'


def test_records_that_do_not_fit_are_named(tmp_path):
    short = NormRecord(write_record(tmp_path / 'short', steps=10) / 'norm_statistics')
    with pytest.raises(RecordError, match='short.*at least 20'):
        measures.measure_pnac(short)
    frozen = NormRecord(write_record(tmp_path / 'frozen', gradient=False) / 'norm_statistics')
    measure = measures.measure_pnac(frozen)
    assert np.isnan(measure.mean('gradient')).all()
    assert 'No layer has gradient statistics' in ' '.join(measure.notes())
    with pytest.raises(RecordError, match='no layer with an outlier filter; its norms are LayerNorm'):
        measures.accumulated_outliers(NormRecord(write_record(tmp_path / 'ln', norm='LayerNorm') / 'norm_statistics'))
    with pytest.raises(RecordError, match='0 to 29, not 30'):
        measures.channel_history(short, 0, 30, 'activation', 4)
    with pytest.raises(RecordError, match='not 30'):
        measures.around_peak(short, 0, 30)
    for window in (0, 11):
        with pytest.raises(RecordError, match=f'window={window}'):
            measures.channel_history(short, 0, 0, 'activation', window)


def test_accumulated_outliers_by_hand(record):
    layers, steps, counts = measures.accumulated_outliers(record, points=4)
    assert layers == NAMES and steps.tolist() == [15, 30, 45, 60]
    assert counts.tolist() == [[0, 0, 0], [0, 0, 0], [5, 7, 15], [10, 15, 30]]


def test_the_choice_of_layers_and_channels(record):
    assert measures.evenly_spaced(NAMES, 2) == [0, 2] and measures.evenly_spaced(NAMES, 9) == [0, 1, 2]
    values = record.activation(1)
    channel = measures.peak_channel(record, 1)
    assert channel == (values.max(axis=0) / np.median(values, axis=0)).argmax()
    rows = measures.around_peak(record, 1, channel, count=20)
    assert rows.start <= values[:, channel].argmax() < rows.stop and rows.stop - rows.start == 20


def test_a_peak_among_zeros_and_steps_that_overflowed():
    values = np.ones((50, 4)) * [1, 10, 100, 0]
    values[20, 1] = 80
    values[30, 2] = 500
    values[40] = np.nan
    for statistics, expected in ((values, 1), (np.zeros((5, 2)), 0), (np.full((5, 2), np.nan), 0)):
        assert measures.peak_channel(SimpleNamespace(activation=lambda layer, found=statistics: found), 0) == expected


def test_means_of_the_last_steps_are_scipys(record):
    history = measures.channel_history(record, 1, 5, 'activation', 4, slice(1, 40))
    assert history.layer == NAMES[1] and history.steps.tolist() == list(range(2, 41))
    values = record.activation(1)[:40, 5].astype(float)
    assert np.isnan(history.gm[:2]).all() and np.isnan(history.am[:2]).all()
    for t in range(3, 40):
        assert history.gm[t - 1] == pytest.approx(gmean(values[t - 3:t + 1]))
        assert history.am[t - 1] == pytest.approx(values[t - 3:t + 1].mean())
    gradient = measures.channel_history(record, 1, 5, 'gradient', 2)  # of both signs
    positive = (gradient.values[:-1] > 0) & (gradient.values[1:] > 0)
    np.testing.assert_array_equal(np.isfinite(gradient.gm[1:]), positive)
    assert np.isfinite(gradient.am[1:]).all()


def test_a_record_is_found_by_file_folder_and_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_record(tmp_path / 'work_dirs' / 'swin')
    for source in (folder, folder / 'norm_statistics', 'configs/swin.py'):
        assert find_record(source).path.samefile(folder / 'norm_statistics')
    for source, message in (('gone', 'no folder gone'), ('x/y.py', 'work_dirs/y'), (tmp_path, 'no record')):
        with pytest.raises(RecordError, match=message):
            find_record(source)
    with pytest.raises(RecordError, match='no steps yet'):
        find_record(write_record(tmp_path / 'empty', steps=0))


def test_names(tmp_path):
    assert distinct_names(['/a/b', '/a/c']) == ['b', 'c']
    assert distinct_names(['/a/x/seed_0', '/a/y/seed_0']) == ['x/seed_0', 'y/seed_0']
    records = [find_record(write_record(tmp_path / name, norm=norm))
               for name, norm in (('one', 'UN'), ('two', 'LayerNorm'))]
    assert run_names(records) == ['one (UN)', 'two (LayerNorm)']
    shutil.copytree(records[0].path, tmp_path / 'one/norm_statistics.old')  # that of an earlier run
    old = find_record(tmp_path / 'one/norm_statistics.old')
    assert run_names([records[0], old]) == ['one (UN)', 'norm_statistics.old (UN)']
    assert short_name(NAMES[1]) == 's0.b0.norm1'


def test_spread_is_the_deviation_between_batches(tmp_path):
    """Of independent log-normal batches, their deviation, also on a trend."""
    rng = np.random.default_rng(0)
    logs = rng.normal(scale=0.3, size=(2000, 64))
    counts = np.stack([np.arange(2000), np.full(2000, -1)], axis=1)
    record = SimpleNamespace(
        path='r', steps=np.arange(1, 2001), layers=[SimpleNamespace(name='a'), SimpleNamespace(name='b')],
        activation=lambda layer, rows: np.exp(logs + 0.002 * layer * np.arange(2000)[:, None])[rows],
        outliers=lambda: counts)
    layers, spread, outliers = measures.batch_spread(record, 1000)
    assert layers == ['a', 'b'] and spread == pytest.approx(0.3, rel=0.02)
    assert outliers[0] == 1000 and np.isnan(outliers[1])
    assert measures.batch_spread(record, 2000).outliers[0] == 1999
    record.steps = record.steps * 2
    with pytest.raises(RecordError, match='interval=1'):
        measures.batch_spread(record, 1000)
