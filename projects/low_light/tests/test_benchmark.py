import json

from tests import tiny_runs


def run(capsys, tmp_path, tool, *arguments):
    """What the benchmark prints, and the rows it writes."""
    tiny_runs.call(tool, '--out', tmp_path, '--threads', 1, '--rounds', 1, *arguments)
    file, = tmp_path.glob('*.jsonl')
    return capsys.readouterr().out, [json.loads(line) for line in file.read_text().splitlines()]


def test_speed(capsys, tmp_path):
    printed, rows = run(capsys, tmp_path, 'low_light:benchmark', '--sizes', '12', '17')
    assert '12 x 17' in printed and [row['norm'] for row in rows] == ['LN', 'LN, folded', 'UN', 'UN, folded']
    assert all(row['shape'] == [1, 3, 12, 17] and row['to_ln']['value'] > 0 for row in rows)
