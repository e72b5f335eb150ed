"""What a person sees who starts a tool."""
import subprocess
import sys

import pytest

from . import tiny_runs

CHATTER = ('OneDL', 'Hooks will be executed', 'System environment', 'custom_hooks', 'FileClient', 'Deprecat')


@pytest.mark.slow
def test_a_run_shows_what_concerns_its_user_and_its_log_has_all(tmp_path):
    config = tiny_runs.write_classifier(tmp_path)
    command = [sys.executable, tiny_runs.ROOT / 'tools/train.py', config, '--work-dir', tmp_path / 'w']
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not any(word in shown.stdout + shown.stderr for word in CHATTER)
    first, second, *others = shown.stdout.splitlines()
    assert 'ImageClassifier; backbone UNSwinTransformer; norms: 7 UN' in first
    assert str(tmp_path / 'w') in second
    assert len(others) < 8 and 'accuracy/top1' in others[-1] and not shown.stderr
    log, = (tmp_path / 'w').rglob('*.log')
    assert all(word in log.read_text() for word in CHATTER[1:4])


def test_verbose_shows_all(tmp_path, capsys):
    config = tiny_runs.write_classifier(tmp_path)
    tiny_runs.call(tiny_runs.load_tool('train'), config, '--work-dir', tmp_path / 'w', '--verbose')
    shown = capsys.readouterr().out
    assert all(word in shown for word in CHATTER[1:4])


def test_a_warning_that_concerns_the_user_stays(tmp_path, capsys):
    config = tiny_runs.write_classifier(tmp_path)
    train = tiny_runs.load_tool('train')
    tiny_runs.call(train, config, '--work-dir', tmp_path / 'w', '--cfg-options',
                   'model.backbone.norm_cfg.warmup_iters=100')
    assert 'UN never leaves its warm-up in this run' in capsys.readouterr().out
