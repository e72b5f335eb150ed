import cv2
import numpy as np
import pytest
import torch
from mmengine.registry import DATASETS

from mmunorm.utils import LocalError, PreflightError
from projects.low_light.low_light import LoadPair, PackPair, PairDataset


@pytest.fixture
def folder(tmp_path):
    for name in ('low', 'high'):
        (tmp_path / name).mkdir()
    return tmp_path


def write(path, image=None, size=(12, 16)):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8) if image is None else image
    cv2.imwrite(str(path), image)


def dataset(folder, **settings):
    return PairDataset(data_root=str(folder), data_prefix=dict(img='low', target='high'), **settings)


def names(pairs):
    return [tuple(pairs.get_data_info(i)[key].rpartition('/')[2] for key in ('img_path', 'target_path'))
            for i in range(len(pairs))]


def test_pairs_of_one_name(folder):
    for name in ('2.png', '1.png'):
        write(folder / 'low' / name)
        write(folder / 'high' / name.replace('.png', '.jpg'))
    (folder / 'low' / 'readme.txt').write_text('')
    assert names(dataset(folder)) == [('1.png', '1.jpg'), ('2.png', '2.jpg')]


@pytest.mark.parametrize('low, high, rename', [
    (['low00001.png'], 'normal00001.png', ('^low', 'normal')),
    (['a1-x_0.png', 'a1-x_N1.5.png', 'a1-x_N1.png', 'a1-x_P1.png'], 'a1-x.png', (r'_(0|N1|N1\.5|P1|P1\.5)$', '')),
])
def test_pairs_of_other_names(folder, low, high, rename):
    for name in low:
        write(folder / 'low' / name)
    write(folder / 'high' / high)
    assert names(dataset(folder, rename=rename)) == [(name, high) for name in low]


def test_missing_files(folder):
    with pytest.raises(PreflightError, match='no image in the folder .*low'):
        dataset(folder)
    write(folder / 'low/1.png')
    write(folder / 'high/2.png')
    with pytest.raises(PreflightError, match=r'low/1.png has no target: no image 1 in .*high'):
        dataset(folder)


@pytest.mark.parametrize('kind', ['grey', '16 bit', 'alpha', '1 x 1'])
def test_any_image_becomes_three_channels_of_8_bits(folder, kind):
    image = np.arange(48, dtype=np.uint8).reshape(3, 4, 4)
    image = {'grey': image[..., 0], '16 bit': image[..., :3].astype(np.uint16) * 257, 'alpha': image,
               '1 x 1': image[:1, :1, :3]}[kind]
    write(folder / 'low/1.png', image)
    write(folder / 'high/1.png', image)
    pairs = dataset(folder, pipeline=[LoadPair(), PackPair()])
    data = pairs[0]
    expected = np.stack([image] * 3, -1) if kind == 'grey' else image[..., :3] // (257 if kind == '16 bit' else 1)
    assert data['inputs'].dtype == torch.uint8
    np.testing.assert_array_equal(data['inputs'].permute(1, 2, 0), expected)
    assert data['data_samples'].img_path.endswith('low/1.png')


def test_steps_do_the_same_to_both(folder):
    write(folder / 'low/1.png')
    write(folder / 'high/1.png')
    pairs = DATASETS.build(dict(
        type='PairDataset', data_root=str(folder), data_prefix=dict(img='low', target='high'),
        pipeline=[dict(type='LoadPair'), dict(type='RandomCropPair', crop_size=(8, 40)), dict(type='RandomFlipPair'),
                  dict(type='PackPair')]))
    np.random.seed(0)
    found = [pairs[0] for _ in range(12)]
    assert all(torch.equal(data['inputs'], data['data_samples'].target) for data in found)
    assert {tuple(data['inputs'].shape) for data in found} == {(3, 8, 16)}
    assert len({data['inputs'].numpy().tobytes() for data in found}) > 6


def test_pairs_of_two_sizes_and_invalid_images(folder):
    write(folder / 'low/1.png')
    write(folder / 'high/1.png', size=(12, 15))
    pairs = dataset(folder, pipeline=[LoadPair()])
    with pytest.raises(LocalError, match=r'16 x 12 pixels and its target .*high/1.png 15 x 12'):
        pairs[0]
    for name, content in (('high', b''), ('low', b'no image')):
        (folder / name / '1.png').write_bytes(content)
        with pytest.raises(LocalError, match=f'cannot use the image .*{name}/1.png'):
            pairs[0]


@pytest.mark.parametrize('root, img, message', [
    ('data', 'digits_dark/train', 'make_dark.py'), ('data/lol_v1', 'our485/low', 'LOLdataset.zip'),
    ('data/lol_v2/Real_captured', 'Train/Low', 'LOL-v2'),
    ('data/exposure', 'training/INPUT_IMAGES', 'Exposure_Correction')])
def test_how_to_get_pairs(root, img, message):
    with pytest.raises(PreflightError, match=f'no image in the folder {root}/{img}; .*{message}'):
        PairDataset(data_root=root, data_prefix=dict(img=img, target='target'))
