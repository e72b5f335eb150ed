import json

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope

from mmunorm.utils import PreflightError
from projects.low_light.low_light.exdark import CLASSES, convert_exdark
from tests import tiny_runs

HEADER = '% bbGt version=3\n'


@pytest.fixture
def root(tmp_path):
    """Three images, one a split, of Bicycle, Cat and Table."""
    lines = ['Name | Class | Light | In/Out | Train/Val/Test']
    for split, (label, name) in enumerate((('Bicycle', '2015_00001.png'), ('Cat', '2015_00002.JPG'),
                                           ('Table', '2015_00003.jpeg')), start=1):
        for folder in ('ExDark', 'ExDark_Annno'):
            (tmp_path / folder / label).mkdir(parents=True)
        on_disk = name.replace('JPG', 'jpg')
        cv2.imwrite(str(tmp_path / 'ExDark' / label / on_disk), np.zeros((40, 60, 3), np.uint8))
        (tmp_path / f'ExDark_Annno/{label}/{name}.txt').write_text(
            f'{HEADER}{label} 4 8 20 16 0 0 0 0 0 0 0\nPeople -5 30 90 20 0 0 0 0 0 0 0\n')
        lines.append(f'{name} {CLASSES.index(label) + 1} 2 1 {split}')
    (tmp_path / 'imageclasslist.txt').write_text('\n'.join(lines) + '\n')
    return tmp_path


def test_a_split_is_a_file_of_the_coco_format(root):
    assert convert_exdark(root) == dict(train=(1, 2), val=(1, 2), test=(1, 2))
    content = json.loads((root / 'annotations/val.json').read_text())
    assert content['images'] == [dict(id=1, file_name='Cat/2015_00002.jpg', width=60, height=40)]
    assert [(box['category_id'], box['bbox'], box['area']) for box in content['annotations']] == [
        (6, [4, 8, 20, 16], 320), (11, [0, 30, 60, 10], 600)]
    assert [category['name'] for category in content['categories']] == list(CLASSES)


def test_the_recipe_reads_it(root):
    convert_exdark(root)
    cfg = Config.fromfile(tiny_runs.ROOT / 'projects/low_light/configs/exdark/yolov3_iat_un_exdark.py')
    init_default_scope(cfg.default_scope)
    for dataset in cfg.train_dataloader.dataset.datasets:
        dataset.data_root = str(root)
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    assert len(dataset) == 2 and dataset.metainfo['classes'] == CLASSES
    # The recipe crops at random, so an image as the model sees it may have lost one of its boxes.
    assert [instance['bbox_label'] for instance in dataset.get_data_info(0)['instances']] == [0, 10]
    item = dataset[0]
    assert item['inputs'].shape[0] == 3 and set(item['data_samples'].gt_instances.labels.tolist()) <= {0, 10}
    cfg.test_dataloader.dataset.data_root = str(root)
    assert DATASETS.build(cfg.test_dataloader.dataset)[0]['data_samples'].gt_instances.labels.tolist() == [11, 10]


@pytest.mark.parametrize('file, content, message', [
    ('imageclasslist.txt', 'a.png 13 1 1 1', r"imageclasslist.txt, line 1: .* got 'a.png 13 1 1 1'"),
    ('ExDark_Annno/Cat/2015_00002.JPG.txt', f'{HEADER}Cow 1 2 3 4',
     r"JPG.txt, line 2: must begin with one of Bicycle.* got 'Cow"),
    ('ExDark/Cat/2015_00002.jpg', '', 'is not an image, or truncated'),
    ('imageclasslist.txt', 'header\na.png,1,1,1,1\n', "line 2: .* got 'a.png,1,1,1,1'"),
    ('imageclasslist.txt', 'header\n', 'lists no image'),
    ('imageclasslist.txt', None, 'there is no .*imageclasslist.txt'),
    ('ExDark/Cat/2015_00002.jpg', None, 'there is no image .*2015_00002.JPG'),
])
def test_errors_write_nothing(root, file, content, message):
    (root / file).unlink()
    if content is not None:
        (root / file).write_text(content)
    with pytest.raises(PreflightError, match=message):
        convert_exdark(root)
    assert not (root / 'annotations').exists()


def test_the_tool(root, capsys):
    tiny_runs.call('low_light:exdark_to_coco', root)
    assert f'{root}/annotations/test.json: 1 images with 2 boxes' in capsys.readouterr().out
