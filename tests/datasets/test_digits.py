import json
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

import mmunorm  # noqa: F401  makes mmcv.ops importable before mmdet is
from mmunorm.datasets import (
    CLASSES,
    FolderError,
    digits,
    make_classification_set,
    make_detection_set,
    make_digits,
)
from mmunorm.datasets.digit_scenes import draw_scene, split_samples

SIZES = dict(train_scenes=6, val_scenes=4, scene_size=96)


@pytest.fixture(scope='module')
def coco(tmp_path_factory):
    folder = tmp_path_factory.mktemp('made') / 'coco'
    counts = make_detection_set(folder, seed=5, **SIZES, progress=False)
    return folder, counts


@pytest.fixture(scope='module')
def imagenet(tmp_path_factory):
    folder = tmp_path_factory.mktemp('made') / 'imagenet'
    make_classification_set(folder, seed=5, train_images=40, val_images=20, progress=False)
    return folder


def annotations(folder, split):
    return json.loads((folder / f'annotations/instances_{split}.json').read_text())


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob('*')) if path.is_file()}


def test_coco_layout(coco):
    folder, counts = coco
    assert set(contents(folder)) == (
        {f'annotations/instances_{split}.json' for split in ('train', 'val')}
        | {f'train/{k:06d}.png' for k in range(1, 7)} | {f'val/{k:06d}.png' for k in range(1, 5)})
    for split in ('train', 'val'):
        content = annotations(folder, split)
        assert {'info', 'licenses', 'images', 'annotations', 'categories'} == set(content)
        assert [(c['id'], c['name']) for c in content['categories']] == [
            (k + 1, str(k)) for k in range(10)]
        assert counts[split] == len(content['annotations'])
        assert [ann['id'] for ann in content['annotations']] == list(range(1, counts[split] + 1))
        for image in content['images']:
            with Image.open(folder / split / image['file_name']) as picture:
                assert picture.mode == 'RGB'
                assert picture.size == (image['width'], image['height']) == (96, 96)


def test_masks_boxes_and_areas_are_what_was_drawn(coco):
    """Scene by scene, drawn again: each mask is its glyph's alpha less those of later glyphs."""
    folder, _ = coco
    for split_code, split in enumerate(('train', 'val')):
        content = annotations(folder, split)
        samples = split_samples(split, 5)
        for index, image in enumerate(content['images']):
            rng = np.random.default_rng([5, 1, split_code, index])
            _, glyphs = draw_scene(rng, samples, split, 96)
            anns = [a for a in content['annotations'] if a['image_id'] == image['id']]
            assert [a['digit_id'] for a in anns] == [g.sample.digit_id for g in glyphs]
            hidden = np.zeros((96, 96), dtype=bool)
            for ann, glyph in zip(reversed(anns), reversed(glyphs), strict=True):
                canvas = np.zeros((96, 96))
                height, width = glyph.alpha.shape
                canvas[glyph.top:glyph.top + height, glyph.left:glyph.left + width] = glyph.alpha
                expected = (canvas > 0.5) & ~hidden
                hidden |= canvas > 0.5
                rle = ann['segmentation']
                assert isinstance(rle['counts'], str)
                assert (coco_mask.decode(rle) == expected).all()
                assert ann['bbox'] == coco_mask.toBbox(rle).tolist()
                assert ann['area'] == coco_mask.area(rle) == expected.sum()
                assert ann['category_id'] == glyph.sample.label + 1
                assert ann['iscrowd'] == 0


def test_splits_share_no_handwriting(coco, imagenet):
    """Across both sets, since a classifier's weights start a detector."""
    used = {split: {ann['digit_id'] for ann in annotations(coco[0], split)['annotations']}
            for split in ('train', 'val')}
    for split in used:
        for path in (imagenet / split).rglob('*.png'):
            used[split].add(int(re.fullmatch(r'digit(\d{4})_\d+', path.stem)[1]))
    assert len(used['train']) > 40 and len(used['val']) > 20
    assert not used['train'] & used['val']


def test_mmpretrain_reads_it(imagenet, split='train', count=40):
    from mmpretrain.datasets import CustomDataset
    from sklearn.datasets import load_digits
    dataset = CustomDataset(data_root=str(imagenet), data_prefix=split,
                            pipeline=[dict(type='LoadImageFromFile')])
    assert dataset.CLASSES == CLASSES
    assert len(dataset) == count
    assert set(Counter(dataset.get_gt_labels().tolist()).values()) == {count // 10}
    target = load_digits().target
    for item in dataset:
        assert item['img'].shape == (32, 32, 3)
        digit_id = int(re.search(r'digit(\d{4})_', item['img_path'])[1])
        assert item['gt_label'] == target[digit_id]


def test_same_arguments_same_files(coco, imagenet, tmp_path, capfd):
    make_detection_set(tmp_path / 'coco', seed=5, **SIZES, progress=True)
    assert not capfd.readouterr().err  # the bars are for terminals
    make_classification_set(tmp_path / 'imagenet', seed=5, train_images=40, val_images=20)
    assert contents(tmp_path / 'coco') == contents(coco[0])
    assert contents(tmp_path / 'imagenet') == contents(imagenet)


def test_scenes_do_not_depend_on_their_number(coco, tmp_path):
    make_detection_set(tmp_path, seed=5, **{**SIZES, 'train_scenes': 2}, progress=False)
    few, many = contents(tmp_path), contents(coco[0])
    pictures = [name for name in few if name.endswith('.png')]
    assert len(pictures) == 6
    assert all(few[name] == many[name] for name in pictures)


def test_seed_changes_everything(coco, tmp_path):
    make_detection_set(tmp_path, seed=6, **SIZES, progress=False)
    other, known = contents(tmp_path), contents(coco[0])
    assert set(other) == set(known)
    assert not any(other[name] == known[name] for name in other)


@pytest.mark.parametrize('name, value', [('val_scenes', -1), ('scene_size', 128.)])
def test_bad_detection_settings(tmp_path, name, value):
    with pytest.raises(ValueError, match=f'^{name} must be a whole number from .* got {value}$'):
        make_detection_set(tmp_path / 'coco', **{name: value})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize('name, value', [('train_images', 0), ('image_size', 15), ('seed', 2**32)])
def test_bad_classification_settings(tmp_path, name, value):
    with pytest.raises(ValueError, match=f'^{name} must be a whole number from .* got {value}$'):
        make_classification_set(tmp_path / 'imagenet', **{name: value})
    assert not any(tmp_path.iterdir())


TINY = dict(train_scenes=2, val_scenes=2, scene_size=64, train_images=10, val_images=10,
            image_size=16, progress=False)


def test_make_digits(tmp_path):
    out = tmp_path / 'data' / 'digits'
    counts = make_digits(out, **TINY)
    assert {path.name for path in out.iterdir()} == {
        'coco', 'imagenet', 'preview.png', '.made_by_mmunorm.json'}
    for split in ('train', 'val'):
        assert counts[split] == len(annotations(out / 'coco', split)['annotations'])
    with Image.open(out / 'preview.png') as preview:
        assert len(set(preview.convert('RGB').getdata())) > 1000

    before = contents(out)
    assert make_digits(out, **TINY) is None
    with pytest.raises(FolderError, match=r'seed 0 instead of 1.*--force'):
        make_digits(out, **TINY, seed=1)
    assert contents(out) == before
    make_digits(out, **TINY, seed=1, force=True)
    assert contents(out) != before
    make_digits(out, **TINY, force=True)
    assert contents(out) == before


@pytest.mark.parametrize('error', [KeyboardInterrupt, OSError])
def test_interruption_leaves_nothing(tmp_path, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    out = tmp_path / 'digits'
    with monkeypatch.context() as patch:
        patch.setattr(digits, 'draw_single', fail)
        with pytest.raises(error):
            make_digits(out, **TINY)
        assert not any(tmp_path.iterdir())
    make_digits(out, **TINY)
    before = contents(tmp_path)
    monkeypatch.setattr(digits, 'draw_single', fail)
    with pytest.raises(error):
        make_digits(out, **TINY, force=True)
    assert contents(tmp_path) == before
