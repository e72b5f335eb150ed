import json
import resource

import numpy as np
import pytest

from projects.paper.paper.norm_record import NormRecord, NormRecordWriter, RecordedNorm, RecordError, row_dtypes

LAYERS = [RecordedNorm('a.norm', 'UN', 3, 'some gradient'), RecordedNorm('b.norm', 'LayerNorm', 2, 'another')]


def rows(first, count):
    """Rows whose values tell where they belong: 100 * step + channel, gradients 50 more."""
    steps, snapshot = (np.zeros(number, dtype) for number, dtype in zip((count, 1), row_dtypes(LAYERS), strict=True))
    steps['step'] = np.arange(first, first + count)
    steps['activation'] = 100 * steps['step'][:, None] + np.arange(5)
    steps['gradient'] = steps['activation'] + 50
    steps['outliers'] = np.stack([steps['step'] // 2, np.full(count, -1)], axis=1)
    snapshot['step'], snapshot['mean'], snapshot['running_var'] = first, first, -first
    return steps, snapshot


@pytest.fixture
def path(tmp_path):
    path = tmp_path / 'w' / 'norm_statistics'
    writer = NormRecordWriter(path, LAYERS, dict(run='w', interval=1))
    for first, count in ((1, 10), (11, 10), (21, 5)):
        writer.append(*rows(first, count))
    return path


def check(path, last):
    record = NormRecord(path)
    steps = np.arange(1, last + 1)
    assert record.steps.tolist() == steps.tolist()
    np.testing.assert_array_equal(record.activation('b.norm'), 100 * steps[:, None] + [3, 4])
    np.testing.assert_array_equal(record.gradient(0), 100 * steps[:, None] + [50, 51, 52])
    np.testing.assert_array_equal(record.outliers()[:, 0], steps // 2)
    return record


def test_reads_what_was_written_and_numpy_and_json_alone_do(path):
    record = check(path, 25)
    assert record.layers == LAYERS and record.info['run'] == 'w'
    assert record.activation(0).dtype == np.float32
    np.testing.assert_array_equal(record.activation(0, slice(8, 12))[:, 0], [900, 1000, 1100, 1200])
    for read, sign in ((record.mean, 1), (record.running_var, -1)):
        steps, values = read('b.norm')
        assert steps.tolist() == [1, 11, 21]
        np.testing.assert_array_equal(values, sign * np.array([[1, 1], [11, 11], [21, 21]]))
    layers = json.loads((path / 'record.json').read_text())['layers']
    assert [layer['name'] for layer in layers] == ['a.norm', 'b.norm']
    steps = np.load(path / 'steps.npy')
    assert steps['step'].tolist() == list(range(1, 26)) and steps['gradient'].shape == (25, 5)


def test_rows_that_do_not_fit_on_the_disk_cost_no_earlier_ones(path):
    """At any point of the write. A limit of the file size simulates a full disk."""
    writer = NormRecordWriter(path, LAYERS, dict(interval=1), resume_step=25)
    size = (path / 'steps.npy').stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 100, 9 * row_dtypes(LAYERS)[0].itemsize + 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, limits[1]))
        try:
            with pytest.raises(OSError, match='File too large'):
                writer.append(*rows(26, 10))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        check(path, 25)
    writer.append(*rows(26, 10))
    check(path, 35)


@pytest.mark.parametrize('step', [1, 10, 14, 25, 99])
def test_steps_after_the_resumed_one_are_dropped(path, step):
    writer = NormRecordWriter(path, LAYERS, dict(interval=1), resume_step=step)
    kept = min(step, 25)
    assert check(path, kept).mean(0)[0].tolist() == [first for first in (1, 11, 21) if first <= step]
    writer.append(*rows(kept + 1, 3))
    writer.append(*rows(kept + 4, 30))
    check(path, kept + 33)


def test_a_new_run_moves_the_old_record_aside(path, tmp_path):
    (path.parent / 'norm_statistics.new').touch()  # it cannot create its record
    with pytest.raises(OSError):
        NormRecordWriter(path, LAYERS, {})
    check(path, 25)
    (path.parent / 'norm_statistics.new').unlink()
    NormRecordWriter(path, LAYERS, {}).append(*rows(1, 2))
    check(path, 2)
    check(path.with_name('norm_statistics.old'), 25)


def test_a_record_of_other_layers_or_steps_is_not_continued(path):
    for layers, interval, message in ((LAYERS[:1], 1, 'other layers'),
                                      (LAYERS, 5, 'interval=1, and this run with interval=5')):
        with pytest.raises(RecordError, match=message):
            NormRecordWriter(path, layers, dict(interval=interval), resume_step=20)
    check(path, 25)


@pytest.mark.parametrize('content', [b'', b'hello', b'[1]', b'{"layers": []}', b'\xff'])
def test_invalid_records(tmp_path, content):
    (tmp_path / 'record.json').write_bytes(content)
    with pytest.raises(RecordError, match='is not a record'):
        NormRecord(tmp_path)


def test_damaged_other_and_missing_records(path, tmp_path):
    head = path / 'record.json'
    text = head.read_text()
    head.write_text(text.replace('"version": 3', '"version": 2'))
    with pytest.raises(RecordError, match='version 2 .* reads version 3: remove it'):
        NormRecord(path)
    head.write_text(text)
    with pytest.raises(RecordError, match='c.norm.*a.norm, b.norm'):
        NormRecord(path).activation('c.norm')
    with pytest.raises(RecordError, match='NormStatisticsHook'):
        NormRecord(tmp_path / 'gone')
    for layers in (LAYERS[:1], LAYERS[::-1][:1] * 2):
        info = json.loads(text)
        head.write_text(json.dumps(dict(info, layers=[layer._asdict() for layer in layers])))
        with pytest.raises(RecordError, match='is not a record'):
            NormRecord(path)
    head.write_text(text)
    (path / 'steps.npy').write_bytes(b'\x93NUMPY')
    with pytest.raises(RecordError, match='is not a record'):
        NormRecord(path)
