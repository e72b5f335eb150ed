import json
import pickle
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmpretrain.datasets import CIFAR10
from PIL import Image
from pycocotools import mask as mask_utils

from mmunorm.cli.arguments import load_config
from mmunorm.cli.images import draw_objects, drawing_scale, read_image

from .. import tiny_runs

INFER = tiny_runs.load_tool('infer')


def infer(*arguments):
    tiny_runs.call(INFER, *arguments, '--device', 'cpu')


def read(path):
    image = cv2.imread(str(path))
    assert image is not None
    return image


def test_a_folder_of_images_keeps_its_names_and_predictions_are_json(classifier, tmp_path, capsys):
    config, checkpoint, data = classifier
    infer(config, checkpoint, data, '--out-dir', tmp_path / 'out')
    names = [f'{name}/{number}' for name in ('dark', 'light') for number in (0, 1)]
    for suffix, folder in (('png', 'out'), ('json', 'out/preds')):
        assert sorted(path.relative_to(tmp_path / folder).as_posix() for path in tmp_path.rglob(f'*.{suffix}')) == [
            f'{name}.{suffix}' for name in names]
    printed = capsys.readouterr()
    assert f'{tmp_path / "out"} has 4 images' in printed.out
    assert '4/4' not in printed.err  # the bar is for terminals
    written = json.loads((tmp_path / 'out/preds/light/1.json').read_text())
    assert written['pred_class'] == ('dark', 'light')[written['pred_label']]
    assert written['pred_score'] == max(written['pred_scores']) > 0.5
    assert sum(written['pred_scores']) == pytest.approx(1)

    shutil.copytree(data / 'dark', tmp_path / 'in')
    for limit, names in ((('--limit', '1'), ['0.png']), ((), ['0.png', '1.png'])):
        infer(config, checkpoint, tmp_path / 'in', '--out-dir', tmp_path / 'in/drawn', '--no-save-pred', *limit)
        # Drawings of an earlier run are not images.
        assert sorted(path.name for path in (tmp_path / 'in/drawn').glob('*')) == names


def test_a_class_is_written_on_an_enlarged_image(classifier, tmp_path):
    config, checkpoint, _ = classifier
    red = np.zeros((32, 48, 3), dtype=np.uint8)
    red[..., 2] = 255
    cv2.imwrite(str(tmp_path / 'red.png'), red)
    infer(config, checkpoint, tmp_path / 'red.png', '--out-dir', tmp_path / 'out')
    drawn = read(tmp_path / 'out/red.png')
    assert drawn.shape == (512, 768, 3)
    assert (drawn[256:] == [0, 0, 255]).all() and (drawn[:256, :384] != [0, 0, 255]).any()


def test_boxes_and_masks_grow_with_their_image():
    image, mask = np.zeros((64, 64, 3), np.uint8), np.zeros((1, 64, 64), bool)
    mask[0, 40:50, 40:50] = True
    boxes = np.array([[8., 8., 24., 24.]])
    drawn = draw_objects(image, ('cat', ), np.array([0]), np.array([0.9]), boxes, mask)
    assert drawn.shape == (512, 512, 3) and drawn[330:390, 330:390].any(-1).all()  # the mask
    assert drawn[100, 64].any() and not drawn[250:300, :300].any()  # an edge of the box, and what is beside it
    assert not draw_objects(image, None, np.array([], int), boxes=np.zeros((0, 4))).any()


@pytest.mark.slow
def test_objects_are_drawn_on_an_enlarged_image(tmp_path, capsys):
    """By mmdet's stock Swin with `--norm`."""
    base, _ = tiny_runs.write_detector(tmp_path)
    config = tmp_path / 'stock.py'
    config.write_text(f"_base_ = ['{base}']\nmodel = dict(backbone=dict(_delete_=True, type='SwinTransformer', "
                      "embed_dims=12, depths=[1] * 4, num_heads=[1, 2, 4, 8], window_size=4))\n")
    checkpoint = tiny_runs.save_weights(load_config(str(config), norm='UN'), tmp_path / 'a.pth',
                                        [f'class {i}' for i in range(80)])
    data = tmp_path / 'coco/val2017'
    small = ('--norm', 'UN', '--cfg-options', 'test_dataloader.dataset.pipeline.1.scale=(96,72)',
             'model.test_cfg.rcnn.score_thr=0.0', 'model.test_cfg.rcnn.max_per_img=3')
    infer(config, checkpoint, data, '--out-dir', tmp_path / 'some', '--score-thr', '0', *small)
    assert 'objects from' not in capsys.readouterr().out
    infer(config, checkpoint, data, '--out-dir', tmp_path / 'none', '--pred-score-thr', '1', *small)
    found, other = (json.loads(path.read_text()) for path in sorted(tmp_path.glob('some/preds/*.json')))
    best = max(found['scores'] + other['scores'])
    assert (f'2 of 2 images: 0 objects from 1.0, best {best:.2f} (lower --pred-score-thr)' in capsys.readouterr().out)
    assert [len(found[key]) for key in ('labels', 'scores', 'bboxes', 'masks')] == [3] * 4
    height, width = read(data / '000000000001.jpg').shape[:2]
    assert all(0 <= x1 <= x2 <= width and 0 <= y1 <= y2 <= height for x1, y1, x2, y2 in found['bboxes'])
    assert mask_utils.decode(found['masks']).shape == (height, width, 3)
    none, some = (read(tmp_path / folder / '000000000001.jpg') for folder in ('none', 'some'))
    assert none.shape == some.shape == (512, 683, 3) and np.abs(some.astype(int) - none).max() > 100


def test_how_much_an_image_is_enlarged():
    sizes = {(128, 128): 4, (64, 128): 8, (600, 900): 1, (10, 1000): 2.048, (10, 4000): 1}
    assert {size: drawing_scale(*size) for size in sizes} == sizes


@pytest.mark.slow
def test_a_cifar_classifier_sees_the_colours_it_was_trained_on(in_a_folder, tmp_path, monkeypatch):
    """The data set hands over RGB arrays, a file is read as BGR: the scores must be the same."""
    config = tiny_runs.ROOT / 'configs/t2t_vit_14_un_cifar10.py'
    cfg = Config.fromfile(config)
    cfg.model.backbone.update(init_cfg=None, num_layers=2)
    options = [*tiny_runs.tiny_data(cfg, tmp_path / 'data', monkeypatch), 'model.backbone.num_layers=2']
    checkpoint = tiny_runs.save_weights(cfg, tmp_path / 'a.pth', CIFAR10.METAINFO['classes'])
    tiny_runs.call('test', config, checkpoint, '--work-dir', 'w', '--out', 'a.pkl', '--cfg-options', *options)
    tested = pickle.loads(Path('a.pkl').read_bytes())

    cfg = load_config(str(config), {'model.backbone.num_layers': 2})
    classifier = INFER.Classifier(cfg, str(checkpoint), 'cpu')
    batch = pickle.loads((tmp_path / 'data/cifar-10-batches-py/test_batch').read_bytes())
    for row, expected in zip(batch['data'], tested, strict=True):
        rgb = row.reshape(3, 32, 32).transpose(1, 2, 0)
        cv2.imwrite('a.png', rgb[..., ::-1])
        scores = classifier.predict(Path('a.png'), read_image(Path('a.png')))[1]['pred_scores']
        # Batches of another size round otherwise; blue for red changes scores by more than 0.001.
        torch.testing.assert_close(torch.tensor(scores), expected['pred_score'], atol=1e-4, rtol=0)


def test_a_photograph_is_turned_as_its_config_says(classifier, tmp_path):
    """Predictions and drawings are those of the stored pixels if the config ignores the orientation."""
    config, checkpoint, _ = classifier
    photograph = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / 'in').mkdir()
    photograph.save(tmp_path / 'in/plain.png')
    photograph.save(tmp_path / 'in/turned.png', exif=exif)
    for color_type, is_same in (('color', False), ('color_ignore_orientation', True)):
        out = tmp_path / color_type
        infer(config, checkpoint, tmp_path / 'in', '--out-dir', out, '--cfg-options',
              f'test_dataloader.dataset.pipeline.0.color_type={color_type}')
        scores = [json.loads((out / f'preds/{name}.json').read_text())['pred_scores'] for name in ('plain', 'turned')]
        assert (scores[0] == pytest.approx(scores[1], abs=1e-6)) == is_same
        assert np.array_equal(*(read(out / f'{name}.png') for name in ('plain', 'turned'))) == is_same
