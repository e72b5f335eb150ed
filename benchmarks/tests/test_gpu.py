"""benchmarks/gpu.py continues after a failing command, and packs the results."""
import importlib
import importlib.util
import json
import sys
from pathlib import Path

from tests import tiny_runs

import pytest
from tests.versions import needs_fused_adamw


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(tiny_runs.ROOT / 'benchmarks')
    return importlib.import_module('gpu')


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
    ('print(1); 1 / 0', 60, 'failed (status 1): ZeroDivisionError: division by zero'),
    ('import time; time.sleep(60)', 1, 'stopped after 1 s'),
    ('print(1)', -3, 'no time left'),
])
def test_the_result_of_a_command(gpu, code, limit, result, tmp_path):
    assert gpu.run([sys.executable, '-c', code], limit, tmp_path / 'log', {}) == result
    assert (tmp_path / 'log').exists()


def test_parts_have_twelve_minutes(gpu, tmp_path):
    limits = {part: sum(run.limit for run in gpu.PARTS[part]('cuda', tmp_path)) for part in gpu.DEFAULT_PARTS}
    assert sum(limits.values()) - limits['digits'] <= 60 * gpu.MINUTES  # which gets the remaining time


@needs_fused_adamw
@pytest.mark.slow
def test_default_parts_run_on_a_cpu(gpu, tmp_path, capsys, monkeypatch):
    """In this process."""
    def run(command, limit, log, environment):
        importlib.import_module(Path(command[1]).stem).main(command[2:])
        log.write_text('')
        return 'done'

    monkeypatch.setattr(gpu, 'run', run)
    monkeypatch.chdir(tiny_runs.ROOT)
    out = tmp_path / 'out'
    gpu.main(['--device', 'cpu', '--parts', 'steps', 'inference', 'adapt', '--out', str(out)])
    rows = {key: [json.loads(line) for path in out.glob(f'report/results/**/{key}_*.jsonl')
                  for line in path.read_text().splitlines()] for key in ('gpu', 'inference', 'train_step')}
    assert [row['result'] for row in rows['gpu']] == ['done', 'done']
    assert [(row['norm'], row['amp']) for row in rows['train_step']] == [('LN', 'bf16'), ('UN', 'bf16')]
    assert [row['norm'] for row in rows['inference']] == ['LN', 'exact', 'UN', 'UN folded']
    assert all(row['to_ln']['value'] > 0 for row in rows['train_step'] + rows['inference'])
    assert 'adapt is left out: it needs --vit and --crops' in capsys.readouterr().out
