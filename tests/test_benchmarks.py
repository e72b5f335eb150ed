"""The benchmarks of docs/speed.md run, and print a row for each measurement."""
import json
import subprocess
import sys

import pytest

from . import tiny_runs


def run(name, tmp_path, *arguments):
    """What `benchmarks/NAME.py` prints, and the rows it writes."""
    command = [sys.executable, tiny_runs.ROOT / 'benchmarks' / f'{name}.py', '--out', tmp_path,
               '--threads', '1', '--rounds', '1', *arguments]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    file, = tmp_path.glob(f'{name}_*.jsonl')
    return result.stdout, [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_norm_layers(tmp_path):
    norms = ['UN', 'TokenBN', 'BatchNorm', 'RMSNorm']
    printed, rows = run('norm_layers', tmp_path, '--norms', *norms, '--modes', 'eager', '--batch', '1',
                        '--dtypes', 'float32')
    assert '(1, 3136, 96)' in printed and 'UN / LN' in printed
    assert {(row['norm'], row['shape'][1]) for row in rows} == {
        (norm, tokens) for norm in ('LayerNorm', *norms) for tokens in (3136, 784, 196, 49)}
    assert all(row['to_ln']['value'] > 0 and row['peak_memory_to_ln'] > 0 for row in rows)


@pytest.mark.slow
def test_train_step(tmp_path):
    printed, rows = run('train_step', tmp_path, '--batch', '1', '--size', '224')
    assert 'eager UN' in printed
    assert [row['norm'] for row in rows] == ['LN', 'UN'] and all(row['to_ln']['value'] > 0 for row in rows)
