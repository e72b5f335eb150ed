import json

import cv2
import numpy as np
import pytest

from ..tiny_runs import ROOT, load_tool

METRICS = {**{f'coco/{kind}_{name}': 0.5 for kind in ('bbox', 'segm') for name in ('mAP', 'mAP_50', 'mAP_75')},
           'coco/segm_mAP': 0.125}


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """The demo in an empty folder; its commands are recorded in place of being run."""
    demo = load_tool('demo')
    commands = []

    def run(title, *command):
        commands.append(command)
        if command[0] == 'tools/train.py':
            folder = tmp_path / command[command.index('--work-dir') + 1]
            folder.mkdir(parents=True)
            (folder / 'last_checkpoint').write_text(f'{folder}/iter_1.pth')
            (folder / '1/vis_data').mkdir(parents=True)
            metrics = {**METRICS, 'accuracy/top1': 80}
            (folder / '1/vis_data/scalars.json').write_text(f'{{"loss": 1}}\n{json.dumps(metrics)}\n')
        if command[0] in ('tools/test.py', 'tools/deploy/test.py'):
            folder = tmp_path / command[command.index('--work-dir') + 1] / '20260101_000000'
            folder.mkdir(parents=True)
            (folder / 'log.json').write_text(json.dumps({**METRICS, 'accuracy/top1': 81}))
        if command[0] == 'tools/infer.py':
            folder = tmp_path / command[command.index('--out-dir') + 1]
            folder.mkdir(parents=True)
            for i in range(10):
                cv2.imwrite(str(folder / f'{i}.png'), np.full((20, 20, 3), 25 * i, np.uint8))

    monkeypatch.setattr(demo, 'ROOT', tmp_path)
    monkeypatch.setattr(demo, 'run', run)
    demo.commands = commands
    return demo


def test_steps_and_table(demo, capsys):
    demo.main()
    for command in demo.commands:
        assert (ROOT / command[0]).is_file()
        assert all((ROOT / word).is_file() for word in command if word.startswith('configs/'))
    commands = demo.commands
    # What was trained with LayerNorm is converted, and the teacher of what was converted.
    layer_norm, converted = commands[2][2], commands[2][commands[2].index('--out') + 1]
    assert layer_norm == str(demo.ROOT / demo.LAYER_NORM / 'iter_1.pth')
    assert f'custom_hooks.0.checkpoint={layer_norm}' in commands[3]
    assert f'load_from={converted}/swin_un_classifier.pth' in commands[3]
    # What was trained on is tested, and gives the backbone.
    assert commands[4][2] == str(demo.ROOT / demo.CLASSIFIER / 'iter_1.pth')
    assert f'pretrained={commands[4][2]}' in commands[5]
    # What was trained is drawn with, folded and exported; what was saved is tested.
    assert commands[6][2] == commands[7][2] == commands[9][2] == str(demo.ROOT / demo.DETECTOR / 'iter_1.pth')
    assert commands[8][2] == commands[7][commands[7].index('--save') + 1]
    assert commands[10][2] == commands[9][commands[9].index('--out') + 1]
    printed = capsys.readouterr().out
    assert 'top-1 80.0 with LayerNorm, 81.0 converted' in printed
    for model in ('UN      ', 'folded  ', 'OpenVINO'):
        assert f'| mask | {model} | 0.125 | 0.500 | 0.500 |' in printed
    assert 'work_dirs/demo/pictures' in printed
    sheet = cv2.imread(str(demo.ROOT / demo.SHEET))
    assert sheet.shape == (46, 90, 3) and sheet[12, 34, 0] == 25 and sheet[34, 78, 0] == 175


def test_a_failed_step_ends_the_demo():
    with pytest.raises(SystemExit, match='status 3'):
        load_tool('demo').run('fails', '-c', 'raise SystemExit(3)')
