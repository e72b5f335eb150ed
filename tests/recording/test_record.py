import json

import numpy as np
import pytest

from mmunorm.recording.record import (
    OFFLINE_GRADIENT,
    ONLINE_GRADIENT,
    Layer,
    Record,
    RecordError,
    RecordWriter,
    step_dtype,
)

LAYERS = [Layer('a.norm', 'UN', 3, OFFLINE_GRADIENT), Layer('b.norm', 'LayerNorm', 2, ONLINE_GRADIENT)]


def rows(first, count):
    """Rows whose values tell where they belong: 100 * step + channel, gradients 50 more."""
    steps = np.zeros(count, step_dtype(LAYERS))
    steps['step'] = np.arange(first, first + count)
    steps['activation'] = 100 * steps['step'][:, None] + np.arange(5)
    steps['gradient'] = steps['activation'] + 50
    steps['outliers'] = np.stack([steps['step'] // 2, np.full(count, -1)], axis=1)
    return steps, np.full(5, -steps['step'][-1], np.float32), np.full(5, steps['step'][0], np.float32)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / 'w' / 'norm_statistics'
    writer = RecordWriter(path, LAYERS, dict(run='w', interval=1))
    for first, count in ((1, 10), (11, 10), (21, 5)):
        writer.append(*rows(first, count))
    return path


def check(record, last):
    steps = np.arange(1, last + 1)
    assert record.steps.tolist() == steps.tolist()
    np.testing.assert_array_equal(record.activation('b.norm'), 100 * steps[:, None] + [3, 4])
    np.testing.assert_array_equal(record.gradient(0), 100 * steps[:, None] + [50, 51, 52])
    np.testing.assert_array_equal(record.outliers()[:, 0], steps // 2)


def test_reads_what_was_written(path):
    record = Record(path)
    assert record.layers == LAYERS and record.info['run'] == 'w'
    check(record, 25)
    assert record.activation(0).dtype == np.float32
    np.testing.assert_array_equal(record.activation(0, slice(8, 12))[:, 0], [900, 1000, 1100, 1200])
    steps, running = record.running_var('b.norm')
    assert steps.tolist() == [10, 20, 25] and running.tolist() == [[-10, -10], [-20, -20], [-25, -25]]
    steps, mean = record.mean('b.norm')
    assert steps.tolist() == [1, 11, 21] and mean.tolist() == [[1, 1], [11, 11], [21, 21]]


def test_numpy_and_json_alone_read_it(path):
    layers = json.loads((path / 'record.json').read_text())['layers']
    assert [layer['name'] for layer in layers] == ['a.norm', 'b.norm']
    blocks = [np.load(file, allow_pickle=False) for file in sorted(path.glob('steps_*.npy'))]
    assert np.concatenate([block['step'] for block in blocks]).tolist() == list(range(1, 26))


def test_a_block_that_was_being_written_costs_no_earlier_one(path, monkeypatch):
    save = np.save

    def killed(file, array):
        save(file, array)
        file.truncate(file.tell() // 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(np, 'save', killed)
    writer = RecordWriter(path, LAYERS, dict(interval=1), resume_step=25)
    with pytest.raises(KeyboardInterrupt):
        writer.append(*rows(26, 10))
    monkeypatch.undo()
    check(Record(path), 25)
    writer.append(*rows(26, 10))
    check(Record(path), 35)


@pytest.mark.parametrize('step', [1, 9, 10, 14, 20, 24, 25, 99])
def test_steps_after_the_resumed_one_are_dropped(path, step):
    writer = RecordWriter(path, LAYERS, dict(interval=1), resume_step=step)
    kept = min(step, 25)
    check(Record(path), kept)
    assert (Record(path).running_var(0)[0] <= step).all()
    steps, mean = Record(path).mean(0)
    assert steps.tolist() == mean[:, 0].tolist() == [first for first in (1, 11, 21) if first <= step]
    writer.append(*rows(kept + 1, 30))
    check(Record(path), kept + 30)


def test_a_new_run_moves_the_old_record_aside(path):
    RecordWriter(path, LAYERS, {}).append(*rows(1, 2))
    check(Record(path), 2)
    check(Record(path.with_name('norm_statistics.old')), 25)


def test_a_record_of_other_layers_or_steps_is_not_continued(path):
    with pytest.raises(RecordError, match='other layers'):
        RecordWriter(path, LAYERS[:1], dict(interval=1), resume_step=20)
    with pytest.raises(RecordError, match='interval=1, and this run with interval=5'):
        RecordWriter(path, LAYERS, dict(interval=5), resume_step=20)
    check(Record(path), 25)


@pytest.mark.parametrize('content', [b'', b'hello', b'[1]', b'{"format": "other"}', b'\xff'])
def test_what_is_no_record_is_named(tmp_path, content):
    (tmp_path / 'record.json').write_bytes(content)
    with pytest.raises(RecordError, match='is no record'):
        Record(tmp_path)


def test_a_damaged_block_and_a_later_version_are_named(path):
    head = path / 'record.json'
    head.write_text(head.read_text().replace('"version": 2', '"version": 3'))
    with pytest.raises(RecordError, match='version 3 .* up to 2'):
        Record(path)
    head.write_text(head.read_text().replace('"version": 3', '"version": 2'))
    (path / 'steps_0000000010.npy').write_bytes(b'\x93NUMPY')
    with pytest.raises(RecordError, match='is no record'):
        Record(path)


def test_missing_files_and_layers_are_named(path, tmp_path):
    with pytest.raises(RecordError, match='NormStatisticsHook'):
        Record(tmp_path / 'gone')
    with pytest.raises(RecordError, match='c.norm.*a.norm, b.norm'):
        Record(path).activation('c.norm')
