"""tools/ship.py: the plan, what it refuses, and the whole chain of a tiny classifier."""
import json

import pytest
import torch
from mmengine.config import Config

from .. import tiny_runs

for package in ('onnx', 'onnxscript', 'onnxruntime'):
    pytest.importorskip(package)

SHIP = tiny_runs.load_tool('ship')


@pytest.fixture
def ln(tmp_path, monkeypatch):
    """Config and checkpoint of a small classifier with LayerNorm, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tiny_runs.write_classifier(tmp_path)
    path = path.rename(path.with_name('swin_ln_tiny.py'))
    path.write_text(path.read_text().replace("dict(type='UN', warmup_iters=1)", "dict(type='LN')"))
    return path, tiny_runs.save_weights(Config.fromfile(path), tmp_path / 'ln.pth', ('dark', 'light'))


def ship(ln, *arguments):
    return tiny_runs.call(SHIP, *ln, '--format', 'onnx', '--out', 'out', *arguments)


def error_of(capsys, ln, *arguments):
    with pytest.raises(SystemExit) as stop:
        ship(ln, *arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_dry_run_prints_the_commands(ln, tmp_path, capsys):
    stages = ship(ln, '--dry-run', '--cfg-options', 'test_dataloader.batch_size=1')
    printed = capsys.readouterr().out
    assert [stage.command[0].rpartition('/')[2] for stage in stages] == [
        'convert_norms.py', 'train.py', 'test.py', 'export.py', 'test.py', 'benchmark.py', 'infer.py']
    assert all(f'$ {stage}\n' in printed for stage in stages)
    assert 'Training has 1 steps' in printed and 'about a minute or less' in printed  # 2 steps an epoch: a quarter
    assert all(text in str(stages[0]) for text in ('--cfg-options test_dataloader.batch_size=1', '--to UN=UN,warmup'))
    assert not (tmp_path / 'out').exists()
    untrained = ship(ln, '--dry-run', '--steps', '0')
    assert len(untrained) == 6 and 'out/converted/swin_un_tiny.pth' in untrained[1].command


def test_what_is_refused(ln, tmp_path, capsys):
    assert 'argument --steps: must be at least 0, got -1' in error_of(capsys, ln, '--steps', '-1')
    assert "--int8 of onnx must be one of static, got 'full'" in error_of(capsys, ln, '--int8', 'full')
    assert 'no checkpoint nowhere.pth' in error_of(capsys, (ln[0], 'nowhere.pth'))
    assert 'does not fit the config' in error_of(capsys, ln, '--cfg-options', 'model.head.num_classes=3')
    missing = error_of(capsys, ln, '--cfg-options', 'train_dataloader.dataset.data_root=nowhere')
    assert 'nowhere' in missing and not (tmp_path / 'out').exists()
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out/ship.json').write_text(json.dumps({'python tools/other.py': 3.0}))
    assert 'out has another chain, with `python tools/other.py`' in error_of(capsys, ln)


@pytest.mark.slow
def test_the_whole_chain(ln, tmp_path, capsys):
    metrics = ship(ln, '--num-samples', '4', '--adapt-steps', '2', '--steps', '2')
    assert list(metrics) == ['LayerNorm', 'converted', 'trained and folded', 'the file']
    assert metrics['the file'] == metrics['trained and folded']
    report = (tmp_path / 'out/report.html').read_text()
    assert 'accuracy/top1' in report and report.count('data:image/png') == 4 and 'ONNX Runtime' in report
    assert 'backbone.stages.1.blocks.0.norm1' in report and 'src="http' not in report
    state = torch.load(tmp_path / 'out/trained/iter_2.pth', weights_only=False)['state_dict']
    assert state['backbone.norm1.num_batches_tracked'] == 2

    done = json.loads((tmp_path / 'out/ship.json').read_text())
    written = (tmp_path / 'out/trained/iter_2.pth').stat().st_mtime_ns
    (tmp_path / 'out/model.onnx').unlink()  # is made again; nothing else is
    del done[next(command for command in done if 'export.py' in command)]
    (tmp_path / 'out/ship.json').write_text(json.dumps(done))
    capsys.readouterr()
    assert ship(ln, '--num-samples', '4', '--adapt-steps', '2', '--steps', '2') == metrics
    assert capsys.readouterr().out.count('=== is done') == 6 and (tmp_path / 'out/model.onnx').exists()
    assert (tmp_path / 'out/trained/iter_2.pth').stat().st_mtime_ns == written


@pytest.mark.slow
def test_a_failed_stage_is_named(ln, tmp_path, capsys):
    ln[0].write_text(ln[0].read_text() + "test_evaluator = dict(type='NoSuchMetric')\n")
    with pytest.raises(SystemExit) as stop:
        ship(ln, '--steps', '0')
    assert stop.value.code == 3 and not json.loads((tmp_path / 'out/ship.json').read_text() if (
        tmp_path / 'out/ship.json').exists() else '{}')
    assert 'the same call of ship.py goes on from there' in capsys.readouterr().err
