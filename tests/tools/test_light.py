import cv2
import numpy as np
import pytest
from mmengine.config import Config

from .. import tiny_runs

TOOL = tiny_runs.load_tool('analysis/light')


def test_a_grid_of_pictures_and_a_model_without_iat(classifier, tmp_path, capsys):
    config = tiny_runs.ROOT / 'configs/digits/iat_un_enhancer.py'
    checkpoint = tiny_runs.save_weights(Config.fromfile(config), tmp_path / 'a.pth', ())
    (tmp_path / 'in').mkdir()
    for i in range(3):
        cv2.imwrite(str(tmp_path / f'in/{i}.png'), np.full((9, 7, 3), 20 * i, np.uint8))
    options = ('--out', tmp_path / 'out', '--device', 'cpu')
    tiny_runs.call(TOOL, config, checkpoint, tmp_path / 'in', *options, '--limit', '2')
    assert 'shows 2 pictures' in capsys.readouterr().out and (tmp_path / 'out/light.png').is_file()

    config, checkpoint, _ = classifier
    with pytest.raises(SystemExit):
        tiny_runs.call(TOOL, config, checkpoint, tmp_path / 'in', *options)
    assert 'has no IAT: its model is a ImageClassifier' in capsys.readouterr().err
