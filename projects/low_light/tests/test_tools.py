"""The tools on an enhancer."""
import json
import shutil

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from PIL import Image

from mmunorm.cli.images import read_image
from projects.digits.tests.data import make_digits
from tests import tiny_runs

pytestmark = pytest.mark.usefixtures('in_a_folder')

ENHANCER = tiny_runs.ROOT / 'projects/low_light/configs/digits/iat_un_enhancer.py'


def infer(*arguments):
    tiny_runs.call('infer', *arguments, '--device', 'cpu')


def test_an_enhancer_draws_before_and_after_of_any_image(tmp_path):
    config = ENHANCER
    checkpoint = tiny_runs.save_weights(Config.fromfile(config), tmp_path / 'a.pth', ())
    rng = np.random.default_rng(0)
    images = {'grey.png': rng.integers(0, 60, (12, 17), np.uint8),
                '16_bit.png': rng.integers(0, 2**14, (12, 17, 3)).astype(np.uint16),
                'alpha.png': rng.integers(0, 60, (12, 17, 4), np.uint8),
                'one.png': np.full((1, 1, 3), 30, np.uint8)}
    (tmp_path / 'in').mkdir()
    for name, image in images.items():
        cv2.imwrite(str(tmp_path / 'in' / name), image)
    infer(config, checkpoint, tmp_path / 'in', '--out-dir', tmp_path / 'out')
    assert len(list((tmp_path / 'out').iterdir())) == 4
    for name in images:
        before, drawn = (read_image(tmp_path / folder / name) for folder in ('in', 'out'))
        height, width = before.shape[:2]
        assert drawn.shape == (height, 2 * width, 3)
        np.testing.assert_array_equal(drawn[:, :width], before)
        # Untrained weights also change the image.
        assert not np.array_equal(drawn[:, width:], before)


def test_a_grid_of_images_and_a_model_without_iat(classifier, tmp_path, capsys):
    config = ENHANCER
    checkpoint = tiny_runs.save_weights(Config.fromfile(config), tmp_path / 'a.pth', ())
    (tmp_path / 'in').mkdir()
    for i in range(3):
        cv2.imwrite(str(tmp_path / f'in/{i}.png'), np.full((9, 7, 3), 20 * i, np.uint8))
    options = ('--out', tmp_path / 'out', '--device', 'cpu')
    tiny_runs.call('low_light:light', config, checkpoint, tmp_path / 'in', *options, '--limit', '2')
    assert 'shows 2 images' in capsys.readouterr().out and (tmp_path / 'out/light.png').is_file()

    config, checkpoint, _ = classifier
    error = tiny_runs.error_of(capsys, 'low_light:light', config, checkpoint, tmp_path / 'in', *options)
    assert 'has no IAT: its model is a ImageClassifier' in error


def test_dark_scenes_are_the_same_scenes(tmp_path, capsys):
    make_digits(tmp_path / 'data/digits')
    tiny_runs.call('low_light:make_dark')
    assert 'the 4 images of data/digits/coco' in capsys.readouterr().out
    light, dark = tmp_path / 'data/digits/coco', tmp_path / 'data/digits_dark'
    names = {path.relative_to(light) for path in light.rglob('*.*')}
    assert names == {path.relative_to(dark) for path in dark.rglob('*.*')} - {
        path.relative_to(dark) for path in (dark / 'preview.png', dark / '.made_by_mmunorm.json')}
    for name in names:
        if name.suffix == '.json':
            assert json.loads((light / name).read_text()) == json.loads((dark / name).read_text())
        else:
            assert np.asarray(Image.open(dark / name)).mean() < 0.5 * np.asarray(Image.open(light / name)).mean()
    tiny_runs.call('low_light:make_dark')
    assert 'already exists' in capsys.readouterr().out
    shutil.rmtree(light)
    assert 'make_digits.py' in tiny_runs.error_of(capsys, 'low_light:make_dark', '--out', 'other')
