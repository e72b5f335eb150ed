"""benchmarks/gpu.py goes on after a command that fails, and packs what it found."""
import importlib
import importlib.util
import json
import sys

import pytest
import torch

from . import tiny_runs


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(tiny_runs.ROOT / 'benchmarks')
    return importlib.import_module('gpu')


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_without_a_gpu_it_says_so(gpu, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        gpu.main(['--out', str(tmp_path / 'out')])
    assert stop.value.code == 2 and not (tmp_path / 'out').exists()
    assert capsys.readouterr().err.count('\n') == 1


def test_scripts_take_the_arguments_that_a_gpu_runs_them_with(gpu, tmp_path):
    scripts = set()
    for part in gpu.PARTS.values():
        for run in part('cuda', tmp_path):
            if run.command[1:] and run.command[1].endswith('.py'):
                spec = importlib.util.spec_from_file_location('script', tiny_runs.ROOT / run.command[1])
                script = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(script)
                script.parse_args(['cpu' if word == 'cuda' else word for word in run.command[2:]])  # no GPU here
                scripts.add(spec.origin)
    assert len(scripts) == 7


@pytest.mark.parametrize('code,limit,result', [
    ('print("Throughput: 2.5 qps")', 60, 'Throughput: 2.5 qps'),
    ('print(1)', 60, 'done'),
    ('print(1); 1 / 0', 60, 'failed (status 1): ZeroDivisionError: division by zero'),
    ('import time; time.sleep(60)', 1, 'stopped after 1 s'),
    ('print(1)', -3, 'no time left'),
])
def test_what_came_of_a_command(gpu, code, limit, result, tmp_path):
    assert gpu.run([sys.executable, '-c', code], limit, tmp_path / 'log', {}) == result
    assert (tmp_path / 'log').exists()


def test_parts_have_twelve_minutes(gpu, tmp_path):
    limits = {part: sum(run.limit for run in gpu.PARTS[part]('cuda', tmp_path)) for part in gpu.USUAL}
    assert sum(limits.values()) - limits['digits'] <= 60 * gpu.MINUTES  # which gets what is left


@pytest.mark.slow
def test_what_people_run_first_is_measured_tiny_on_a_cpu(gpu, tmp_path, capsys):
    out = tmp_path / 'out'
    gpu.main(['--device', 'cpu', '--parts', 'steps', 'inference', 'adapt', '--out', str(out)])
    rows = {key: [json.loads(line) for path in out.glob(f'report/results/**/{key}_*.jsonl')
                  for line in path.read_text().splitlines()] for key in ('gpu', 'inference', 'train_step')}
    assert [row['result'] for row in rows['gpu']] == ['done', 'done']
    assert [row['norm'] for row in rows['train_step']] == ['LN', 'UN']
    assert [row['norm'] for row in rows['inference']] == ['LN', 'exact', 'UN', 'UN folded']
    assert all(row['to_ln']['value'] > 0 for row in rows['inference'])
    assert 'adapt is left out: it needs --vit and --crops' in capsys.readouterr().out
