import json

from tests import tiny_runs


def run(capsys, tmp_path, tool, *arguments):
    """What the benchmark prints, and the rows it writes."""
    tiny_runs.call(tool, '--out', tmp_path, '--threads', 1, '--rounds', 1, *arguments)
    file, = tmp_path.glob('*.jsonl')
    return capsys.readouterr().out, [json.loads(line) for line in file.read_text().splitlines()]


def test_speed(capsys, tmp_path, monkeypatch):
    sizes = dict(encoder_layers=1, decoder_layers=1, embed_dims=8, feedforward_channels=8, num_heads=2)
    speed = tiny_runs.load_tool('translation:benchmark')
    monkeypatch.setattr(speed, 'SMALL', sizes)
    monkeypatch.setattr(speed, 'VOCABULARY', 20)
    printed, rows = run(capsys, tmp_path, speed, '--sentences', '3', '--searched', '2', '--length', '4')
    assert '| search | LN, no cache |' in printed
    assert [(row['what'], row['norm']) for row in rows] == [
        ('training', 'LN'), ('training', 'UN'), ('search', 'LN'), ('search', 'UN'), ('search', 'UN, folded'),
        ('search', 'LN, no cache')]
    assert all(row['to_ln']['value'] > 0 for row in rows)
