import json

import cv2
import numpy as np
import pytest

from ..tiny_runs import ROOT, load_tool


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
        if command[0] in ('tools/test.py', 'tools/deploy/test.py'):
            folder = tmp_path / command[command.index('--work-dir') + 1] / '20260101_000000'
            folder.mkdir(parents=True)
            metrics = {f'coco/{kind}_{name}': 0.5 for kind in ('bbox', 'segm')
                       for name in ('mAP', 'mAP_50', 'mAP_75')}
            (folder / 'log.json').write_text(
                json.dumps(dict(metrics, **{'coco/segm_mAP': 0.125, 'accuracy/top1': 80 + ('--fuse' in command)})))

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
    # What was trained with LayerNorm is tested, converted, and the teacher of what was converted.
    layer_norm, converted = commands[2][2], commands[3][commands[3].index('--out') + 1]
    assert layer_norm == commands[3][2] == str(demo.ROOT / demo.LAYER_NORM / 'iter_1.pth')
    assert f'custom_hooks.0.checkpoint={layer_norm}' in commands[4]
    assert f'load_from={converted}/swin_un_classifier.pth' in commands[4]
    # What was trained on is tested, and gives the backbone.
    assert commands[5][2] == str(demo.ROOT / demo.CLASSIFIER / 'iter_1.pth')
    assert f'pretrained={commands[5][2]}' in commands[6]
    # What was trained is what is tested and drawn with.
    assert commands[7][2] == commands[8][2] == commands[9][2] == str(demo.ROOT / demo.DETECTOR / 'iter_1.pth')
    # What was saved folded is tested again.
    assert commands[10][2] == commands[9][commands[9].index('--save') + 1]
    # The same checkpoint is exported, and the file that is made is tested.
    assert commands[11][2] == commands[7][2]
    assert commands[12][2] == commands[11][commands[11].index('--out') + 1]
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
