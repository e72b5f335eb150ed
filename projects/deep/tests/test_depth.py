import csv
from pathlib import Path

import pytest
from PIL import Image

from projects.paper.tests.logs import train, write_log
from tests import tiny_runs

pytestmark = pytest.mark.usefixtures('in_a_folder')


def write_deep_run(folder, layers, scheme):
    write_log(folder, '1', [*(train(step, 2 / step) for step in (1, 2, 300)), {'accuracy/top1': 91.5, 'step': 1}])
    (folder / 'config.py').write_text(
        f"model = dict(backbone=dict(norm_cfg=dict(type='UN'), residual_cfg=dict(type='{scheme}')))\n")
    (folder / 'layers.csv').write_text('step,layer,gradient,cosine,active\n' + ''.join(
        f'{step},layers.{i},{3 * step},{0.9 - 0.1 * i:.7g},0.5\n' for step in (1, 2, 300) for i in range(layers)))


def test_depth_of_two_runs_and_errors(tmp_path, capsys):
    write_deep_run(tmp_path / 'deep', 4, 'BranchNorm'), write_deep_run(tmp_path / 'flat', 1, 'PostNorm')
    tiny_runs.call('deep:depth', 'deep', 'flat', '--out', 'a')
    assert min(Image.open('a/depth.png').size) > 500
    with open('a/depth.csv', newline='') as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 5 and rows[3] == dict(
        run='deep', layer='layers.3', step='1', gradient='3', cosine='0.6', active='0.5')
    table = Path('a/depth.md').read_text().splitlines()
    assert table[2:] == ['| deep | 4 | BranchNorm | UN | 12 | 300 | 0.006667 | top-1 accuracy (%) 91.50 |',
                         '| flat | 1 | PostNorm | UN | 6 | 300 | 0.006667 | top-1 accuracy (%) 91.50 |']
    (tmp_path / 'flat/layers.csv').unlink()
    assert 'LayerStatisticsHook' in tiny_runs.error_of(capsys, 'deep:depth', 'deep', 'flat', '--out', 'b')
    with pytest.raises(SystemExit):
        tiny_runs.call('deep:depth', 'deep', '--out', 'b', '--steps', '0')
