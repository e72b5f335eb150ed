"""benchmarks/gpu.py goes on after a command that fails, and packs what it found."""
import importlib
import importlib.util
import json
import sys
import zipfile

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


def test_the_commit_needs_no_git(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    assert gpu.checked_out() == ''


def test_a_table_of_several_models(gpu, tmp_path):
    path = tmp_path / 'rows.jsonl'
    measured = dict(error=None, throughput=dict(median=2.), peak_memory=3e6)
    rows = [dict(model='a', mode='eager', name='LN', error='out of memory'),
            dict(model='a', mode='eager', name='UN', **measured), dict(model='b', mode='eager', name='LN', **measured)]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    assert gpu.fusion_table(path)[2:] == ['| a | eager | out of memory | 2 (3) |', '| b | eager | 2 (3) | - |']


def test_rows_of_one_name_become_one_file(gpu, tmp_path):
    source, target = tmp_path / 'source', tmp_path / 'target'
    for folder, text in (('a', '1\n'), ('b', '2\n')):
        (source / folder).mkdir(parents=True)
        (source / folder / 'rows.jsonl').write_text(text)
    target.mkdir()
    gpu.keep_rows(source, target)
    assert (target / 'rows.jsonl').read_text() == '1\n2\n'


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


@pytest.mark.slow
def test_a_part_may_fail(gpu, tmp_path, monkeypatch):
    trtexec = tmp_path / 'bin/trtexec'
    trtexec.parent.mkdir()
    trtexec.write_text('#!/bin/sh\ncase $1 in *ln.onnx) echo no kernel; exit 3;; esac\n'
                       'test -s "${1#--onnx=}" && echo "Throughput: 12.5 qps"\n')
    trtexec.chmod(0o755)
    monkeypatch.setenv('PATH', f'{trtexec.parent}:/usr/bin:/bin')
    out = tmp_path / 'out'
    gpu.main(['--device', 'cpu', '--parts', 'trtexec', '--out', str(out)])
    file, = (out / 'report/results').iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row['result'] for row in rows] == ['done', 'failed (status 3): no kernel', 'done', 'Throughput: 12.5 qps']
    page = (out / 'report/gpu.md').read_text()
    assert 'no kernel' in page and 'tools/deploy/export.py configs/digits/swin_un_classifier.py' in page
    with zipfile.ZipFile(out / 'gpu.zip') as archive:
        assert {'gpu.md', f'results/{file.name}', 'logs/trtexec_un_batch_1.log'} <= set(archive.namelist())
