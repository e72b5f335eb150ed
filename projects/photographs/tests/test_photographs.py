import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

import mmunorm  # noqa: F401  makes mmcv.ops importable before mmdet is
from mmunorm.utils import PreflightError
from projects.digits.digits.atomic_folder import FolderError
from projects.photographs.photographs import photographs
from projects.photographs.photographs.photographs import CLASSES, SPLITS, make_photographs
from projects.photographs.photographs.stamps import BACKGROUNDS

from .makers import make_stamps, make_tiny

TINY = dict(train_scenes=6, val_scenes=4, train_images=42, val_images=21, image_size=24)


@pytest.fixture(scope='module')
def data_set(tmp_path_factory):
    root = tmp_path_factory.mktemp('photographs')
    return root / 'out', make_tiny(root / 'out', root, **TINY)


def scenes_of(folder, split):
    return json.loads((folder / f'coco/annotations/instances_{split}.json').read_text())


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def used(folder):
    """The rows of the README's table: split, kind, image, checksum."""
    rows = [line.strip('| ').split(' | ') for line in (folder / 'README.md').read_text().splitlines()]
    return [row for row in rows if len(row) == 4 and row[0] in SPLITS]


def test_splits_share_neither_objects_nor_backgrounds(data_set):
    folder, counts = data_set
    rows = used(folder)
    checksums = {split: {row[3] for row in rows if row[0] == split} for split in SPLITS}
    assert len(set.union(*checksums.values())) == sum(map(len, checksums.values())) == len(rows) == 33
    for split, stamps, backgrounds in (('train', 14, 3), ('val', 7, 1), ('test', 7, 1)):
        assert counts['stamps'][split] == stamps and counts['backgrounds'][split] == backgrounds
        assert Counter(row[1] for row in rows if row[0] == split)['background'] == backgrounds
        listed = {row[2] for row in rows if row[0] == split}
        drawn = {annotation['stamp'] for annotation in scenes_of(folder, split)['annotations']}
        assert drawn and drawn <= listed
        names = {name.rpartition('/')[2] for name in listed}
        assert {path.stem.rpartition('_')[0] for path in (folder / 'imagenet' / split).glob('*/*')} <= names


def test_mmpretrain_reads_it(data_set):
    from mmpretrain.datasets import CustomDataset
    for split, count in (('train', 42), ('val', 21), ('test', 21)):
        dataset = CustomDataset(data_root=str(data_set[0] / 'imagenet'), data_prefix=split,
                                pipeline=[dict(type='LoadImageFromFile')])
        assert dataset.CLASSES == CLASSES and len(dataset) == count
        assert set(Counter(dataset.get_gt_labels().tolist()).values()) == {count // 7}
        assert all(item['img'].shape == (24, 24, 3) for item in dataset)


def test_mmdet_reads_it_and_masks_are_disjoint(data_set):
    from mmdet.datasets import CocoDataset
    folder, counts = data_set
    for split in SPLITS:
        content = scenes_of(folder, split)
        dataset = CocoDataset(data_root=str(folder / 'coco'), ann_file=f'annotations/instances_{split}.json',
                              data_prefix=dict(img=split), metainfo=dict(classes=CLASSES))
        assert len(dataset) == (6 if split == 'train' else 4)
        assert counts['objects'][split] == len(content['annotations']) == sum(
            len(dataset.get_data_info(k)['instances']) for k in range(len(dataset)))
        for image in content['images']:
            annotations = [annotation for annotation in content['annotations'] if annotation['image_id'] == image['id']]
            assert 1 <= len(annotations) <= 6
            masks = [coco_mask.decode(annotation['segmentation']) for annotation in annotations]
            assert np.sum(masks, axis=0).max() == 1
            for annotation, mask in zip(annotations, masks, strict=True):
                assert annotation['area'] == mask.sum() > 0
                assert annotation['bbox'] == coco_mask.toBbox(annotation['segmentation']).tolist()


def test_a_mask_is_where_the_object_is(tmp_path):
    """White objects on black photographs: what is lighter is the mask, except for blurred edges and noise."""
    stamps, wallpapers = make_stamps(tmp_path)
    for path in stamps.rglob('*.png'):
        alpha = Image.open(path).getchannel('A')
        white = Image.new('RGBA', alpha.size, (255, 255, 255))
        white.putalpha(alpha)
        white.save(path)
    for path in wallpapers.iterdir():
        Image.new('RGB', (200, 150)).save(path)
    make_photographs(tmp_path / 'out', stamps, [wallpapers], train_scenes=8, val_scenes=1, scene_size=128,
                     train_images=1, val_images=1)
    content = scenes_of(tmp_path / 'out', 'train')
    for image in content['images']:
        pixels = np.asarray(Image.open(tmp_path / 'out/coco/train' / image['file_name'])).mean(axis=2)
        mask = sum(coco_mask.decode(annotation['segmentation']) for annotation in content['annotations']
                   if annotation['image_id'] == image['id']).astype(bool)
        assert (mask == (pixels > pixels.max() / 3)).mean() > 0.97
        assert pixels[mask].mean() > 3 * pixels[~mask].mean()


def test_files_are_deterministic(data_set, tmp_path):
    """And a scene does not depend on how many there are."""
    make_tiny(tmp_path / 'same', tmp_path / 'a', **TINY)
    same, known = contents(tmp_path / 'same'), contents(data_set[0])
    for files in (same, known):
        files.pop('.made_by_mmunorm.json')  # names the folders of the stamps
    assert same == known
    make_tiny(tmp_path / 'few', tmp_path / 'b', **{**TINY, 'train_scenes': 2, 'val_images': 7})
    few = contents(tmp_path / 'few')
    images = [name for name in few if name.endswith('.png') and name != 'preview.png']
    assert all(few[name] == known[name] for name in images)
    make_tiny(tmp_path / 'other', tmp_path / 'c', **TINY, seed=1)
    assert used(tmp_path / 'other') != used(tmp_path / 'same')
    assert contents(tmp_path / 'other')['coco/train/000001.png'] != known['coco/train/000001.png']


def test_wallpapers_in_several_sizes(tmp_path):
    """The largest file is taken, not links to it, and not a preview."""
    folder = tmp_path / 'wallpapers/Path/contents'
    (folder / 'images').mkdir(parents=True)
    for path, side in (('images/2x2.jpg', 2), ('images/90x90.jpg', 90), ('screenshot.jpg', 400)):
        Image.effect_noise((side, side), 50).save(folder / path)
    (folder / 'images/50x50.jpg').symlink_to('90x90.jpg')
    for name in ('Kite', 'Grey'):
        (tmp_path / f'{name}.jpg').touch()
    (tmp_path / 'stranger.jpg').touch()
    found = dict(photographs.find_backgrounds([tmp_path]))
    assert set(found) == {'Path', 'Kite', 'Grey'} < set(BACKGROUNDS)
    assert found['Path'].resolve() == folder / 'images/90x90.jpg'


def test_too_few_images_are_one_line(tmp_path):
    stamps, wallpapers = make_stamps(tmp_path)
    (stamps / 'space/moon/moon_full.png').unlink()
    (stamps / 'space/planets/1_mercury.png').unlink()
    with pytest.raises(PreflightError, match='has 2 of the 12 stamps of the kind planet'):
        make_photographs(tmp_path / 'out', stamps, [wallpapers])
    with pytest.raises(PreflightError, match='0 are there'):
        make_photographs(tmp_path / 'out', make_stamps(tmp_path / 'new')[0], [stamps])
    assert not (tmp_path / 'out').exists()


def test_a_folder_is_overwritten_only_by_force(tmp_path):
    folders = make_stamps(tmp_path)
    arguments = dict(stamps=folders[0], backgrounds=[folders[1]], train_scenes=1, val_scenes=1, train_images=1,
                     val_images=1)
    assert make_photographs(tmp_path / 'out', **arguments)
    before = contents(tmp_path / 'out')
    assert make_photographs(tmp_path / 'out', **arguments) is None
    with pytest.raises(FolderError, match='seed 0 instead of 1.*--force'):
        make_photographs(tmp_path / 'out', **arguments, seed=1)
    assert contents(tmp_path / 'out') == before
    assert make_photographs(tmp_path / 'out', **arguments, seed=1, force=True)
    assert contents(tmp_path / 'out') != before


@pytest.mark.parametrize('error', [KeyboardInterrupt, OSError])
def test_interruption_writes_nothing(tmp_path, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    folders = make_stamps(tmp_path / 'sources')
    monkeypatch.setattr(photographs, 'draw_single', fail)
    with pytest.raises(error):
        make_photographs(tmp_path / 'data/out', folders[0], [folders[1]], train_scenes=1, val_scenes=1, train_images=1,
                         val_images=1)
    assert not any((tmp_path / 'data').iterdir())
