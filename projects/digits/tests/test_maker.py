import json
import re
from collections import Counter

import numpy as np
import pytest
from mmpretrain.datasets import CustomDataset
from PIL import Image
from pycocotools import mask as coco_mask
from sklearn.datasets import load_digits

from projects.digits.digits import maker
from projects.digits.digits.atomic_folder import FolderError
from projects.digits.digits.digit_scenes import draw_scene, split_samples
from projects.digits.digits.maker import make_digits

SETTINGS = dict(seed=5, train_scenes=6, val_scenes=4, scene_size=96, train_images=40, val_images=20)
TINY = dict(train_scenes=2, val_scenes=2, scene_size=64, train_images=10, val_images=10, image_size=16)


@pytest.fixture(scope='module')
def digit_files(tmp_path_factory):
    """The folder of both sets, and the numbers of digits."""
    folder = tmp_path_factory.mktemp('made') / 'digits'
    return folder, make_digits(folder, **SETTINGS)


def annotations(folder, split):
    return json.loads((folder / f'coco/annotations/instances_{split}.json').read_text())


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob('*')) if path.is_file()}


def test_coco_layout(digit_files):
    folder, counts = digit_files
    assert set(contents(folder / 'coco')) == (
        {f'annotations/instances_{split}.json' for split in ('train', 'val')}
        | {f'train/{k:06d}.png' for k in range(1, 7)} | {f'val/{k:06d}.png' for k in range(1, 5)})
    for split in ('train', 'val'):
        content = annotations(folder, split)
        assert {'info', 'licenses', 'images', 'annotations', 'categories'} == set(content)
        assert [(c['id'], c['name']) for c in content['categories']] == [(k + 1, str(k)) for k in range(10)]
        assert [ann['id'] for ann in content['annotations']] == list(range(1, counts[split] + 1))
        for image in content['images']:
            with Image.open(folder / 'coco' / split / image['file_name']) as opened:
                assert opened.mode == 'RGB'
                assert opened.size == (image['width'], image['height']) == (96, 96)


def test_masks_boxes_and_areas_are_what_was_drawn(digit_files):
    """Scene by scene, drawn again: each mask is its glyph's alpha less those of later glyphs."""
    overlapping = 0
    for split_code, split in enumerate(('train', 'val')):
        content = annotations(digit_files[0], split)
        samples = split_samples(split, 5)
        for index, image in enumerate(content['images']):
            _, _, glyphs = draw_scene(np.random.default_rng([5, 1, split_code, index]), samples, split, 96)
            anns = [a for a in content['annotations'] if a['image_id'] == image['id']]
            assert [a['digit_id'] for a in anns] == [g.sample.digit_id for g in glyphs]
            hidden = np.zeros((96, 96), dtype=bool)
            for ann, glyph in zip(reversed(anns), reversed(glyphs), strict=True):
                canvas = np.zeros((96, 96))
                height, width = glyph.alpha.shape
                canvas[glyph.top:glyph.top + height, glyph.left:glyph.left + width] = glyph.alpha
                expected = (canvas > 0.5) & ~hidden
                overlapping += ((canvas > 0.5) & hidden).sum()
                hidden |= canvas > 0.5
                assert (coco_mask.decode(ann['segmentation']) == expected).all()
                rows, columns = np.nonzero(expected)
                assert ann['bbox'] == [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
                assert ann['area'] == expected.sum()
                assert ann['category_id'] == glyph.sample.label + 1 and ann['iscrowd'] == 0
    assert overlapping > 10


def test_splits_share_no_handwriting(digit_files):
    """Across both sets, since a classifier's weights start a detector."""
    folder, _ = digit_files
    used = {split: {ann['digit_id'] for ann in annotations(folder, split)['annotations']} for split in ('train', 'val')}
    for split in used:
        for path in (folder / 'imagenet' / split).rglob('*.png'):
            used[split].add(int(re.fullmatch(r'digit(\d{4})_\d+', path.stem)[1]))
    assert len(used['train']) > 40 and len(used['val']) > 20
    assert not used['train'] & used['val']


def test_mmpretrain_reads_it(digit_files):
    dataset = CustomDataset(data_root=str(digit_files[0] / 'imagenet'), data_prefix='train',
                            pipeline=[dict(type='LoadImageFromFile')])
    assert dataset.CLASSES == maker.CLASSES
    assert Counter(dataset.get_gt_labels().tolist()) == dict.fromkeys(range(10), 4)
    target = load_digits().target
    for item in dataset:
        assert item['img'].shape == (32, 32, 3)
        assert item['gt_label'] == target[int(re.search(r'digit(\d{4})_', item['img_path'])[1])]


def test_settings_decide_the_files(digit_files, tmp_path, capfd):
    """Their number does not change the scenes, and the seed changes all."""
    make_digits(tmp_path / 'few', **{**SETTINGS, 'train_scenes': 2})
    assert not capfd.readouterr().err  # the bars are for terminals
    known, few = contents(digit_files[0]), contents(tmp_path / 'few')
    changed = {name for name in few if few[name] != known[name]}
    assert changed == {'.made_by_mmunorm.json', 'coco/annotations/instances_train.json'}
    assert len(known) - len(few) == 4
    make_digits(tmp_path / 'other', **{**SETTINGS, 'seed': 6})
    other = contents(tmp_path / 'other')
    assert not any(other[name] == known.get(name) for name in other)


@pytest.mark.parametrize('name, value', [('val_scenes', -1), ('scene_size', 128.), ('train_images', 0),
                                         ('image_size', 15), ('seed', 2**32)])
def test_bad_settings(tmp_path, name, value):
    with pytest.raises(ValueError, match=f'^{name} must be a whole number from .* got {value}$'):
        make_digits(tmp_path / 'digits', **{name: value})
    assert not any(tmp_path.iterdir())


def test_a_folder_is_overwritten_only_by_force(tmp_path):
    out = tmp_path / 'data' / 'digits'
    make_digits(out, **TINY)
    assert {path.name for path in out.iterdir()} == {'coco', 'imagenet', 'preview.png', '.made_by_mmunorm.json'}
    with Image.open(out / 'preview.png') as preview:
        assert len(set(preview.convert('RGB').getdata())) > 1000
    before = contents(out)
    assert make_digits(out, **TINY) is None
    with pytest.raises(FolderError, match='seed 0 instead of 1.*--force'):
        make_digits(out, **TINY, seed=1)
    assert contents(out) == before
    make_digits(out, **TINY, force=True)
    assert contents(out) == before
