import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmunorm.utils import PreflightError
from projects.digits.digits.atomic_folder import FolderError
from projects.photographs.photographs import crops
from projects.photographs.photographs.crops import Source, crops_of, find_images, make_crops, varied_images
from tests import tiny_runs


def photograph(seed, size=(300, 240)):
    """Blurred noise with many colours."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path):
    """Nine photographs, and images to ignore."""
    folder = tmp_path / 'images'
    (folder / 'deep').mkdir(parents=True)
    for seed in range(9):
        photograph(seed).save(folder / f'deep/{seed}.png')
    photograph(3, (200, 210)).save(folder / 'a_smaller_copy.jpg')
    photograph(20, (400, 190)).save(folder / 'low.png')
    Image.new('RGB', (300, 300), 'red').save(folder / 'flat.png')
    (folder / 'broken.png').write_bytes(b'\x89PNG\r\n\x1a\n and no more')
    (folder / 'link.png').symlink_to('deep/1.png')
    (folder / 'text.txt').touch()
    return folder


def names_in(folder):
    return {path.name for path in folder.glob('*.jpg')}


def numbers_in(folder):
    return {name[:5] for name in names_in(folder)}


def test_splits_share_no_image(folder, tmp_path):
    out = tmp_path / 'out'
    counts = make_crops(out, [folder], size=32)
    assert counts == dict(images=dict(train=8, test=1), crops=dict(train=32, test=4))  # of 300 x 240, the fewest
    train, test = numbers_in(out / 'train'), numbers_in(out / 'test')
    assert len(train) == 8 and len(test) == 1 and not train & test
    assert Image.open(next((out / 'test').glob('*.jpg'))).size == (32, 32)
    rows = [line.strip('| ').split(' | ') for line in (out / 'README.md').read_text().splitlines()[-9:]]
    assert [row[2] for row in rows] == [f'images/deep/{seed}.png' for seed in range(9)]
    assert {row[0] for row in rows if row[1] == 'test'} == test


def test_crops_are_deterministic(folder, tmp_path):
    folders = [tmp_path / name for name in 'abc']
    for out, seed in zip(folders, (0, 0, 1), strict=True):
        make_crops(out, [folder], seed, size=16)
    contents = [[path.read_bytes() for path in sorted(out.rglob('*.jpg'))] for out in folders]
    assert contents[0] == contents[1] != contents[2]
    assert make_crops(folders[0], [folder], 0, size=16) is None
    with pytest.raises(FolderError, match='seed 0 instead of 1'):
        make_crops(folders[0], [folder], 1, size=16)


def test_of_near_duplicates_the_largest_file_is_kept(folder):
    found = find_images(folder)
    assert len(found) == 13 and not any(source.name == 'link.png' for source in found)
    kept = varied_images(found)
    assert {source.name for source in kept} == {f'deep/{seed}.png' for seed in range(9)}


def test_a_wallpaper_in_several_sizes_is_one_image(tmp_path):
    for name, side in (('images/300x300', 300), ('images/400x400', 400), ('images_dark/300x300', 300)):
        path = tmp_path / f'Path/contents/{name}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(1, (side, side)).save(path)
    assert [(source.name, source.path.stem) for source in find_images(tmp_path)] == [('Path', '400x400')]


def test_images_inside_resources_of_qt(tmp_path):
    parts = []
    for seed, kind in enumerate(('PNG', 'WEBP', 'JPEG')):
        file = io.BytesIO()
        photograph(seed).save(file, kind)
        parts.append(file.getvalue())
    (tmp_path / 'a.rcc').write_bytes(b'qres' + b''.join(len(part).to_bytes(4, 'big') + part for part in parts)
                                     + b'\x00\xff\xff\xff\xff\xd8\xff, which is no image')
    found = find_images(tmp_path)
    assert sorted(source.read() for source in found) == sorted(parts)
    assert all(source.open().size == (300, 240) for source in found)


def test_transparent_pixels_are_grey(tmp_path):
    image = photograph(0).convert('RGBA')
    image.putalpha(0)
    image.save(tmp_path / 'a.png')
    assert Source('a', tmp_path / 'a.png').open().getextrema() == ((128, 128), ) * 3


@pytest.mark.parametrize('size, number', [((230, 210), 4), ((1000, 600), 11), ((2200, 1400), 60)])
def test_crops_are_squares_of_the_image(size, number):
    """In an image whose colours are the place, red grows from left to right, and green as much from top to bottom."""
    x, y = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255 * size[1] / size[0], size[1]))
    image = Image.fromarray(np.stack([x, y, 0 * x], -1).round().astype(np.uint8))
    sides = []
    for crop in crops_of(image, np.random.default_rng(0), 64):
        pixels = np.asarray(crop, np.float32)
        across, down = np.ptp(pixels[..., 0]), np.ptp(pixels[..., 1])
        assert crop.size == (64, 64) and abs(across - down) <= 2
        sides.append(across / 255 * size[0])
    assert len(sides) == number
    assert min(min(size), 224) * .9 < min(sides) and max(sides) <= min(size)


def test_from_packages(folder, tmp_path, monkeypatch):
    def fetch(root, packages, *words):
        for package in packages:
            (root / package).mkdir(parents=True)
        folder.rename(root / packages[0] / 'share')

    monkeypatch.setattr(crops, 'fetch_packages', fetch)
    make_crops(tmp_path / 'data/out', size=16)
    assert f'{crops.PACKAGES[0]}/share/deep/0.png' in (tmp_path / 'data/out/README.md').read_text()
    assert {path.name for path in (tmp_path / 'data').iterdir()} == {'out', 'debian_images'}


def test_too_few_images_are_one_line(folder, tmp_path):
    for path in (folder / 'deep').glob('[1-9].png'):
        path.unlink()
    (folder / 'a_smaller_copy.jpg').unlink()
    with pytest.raises(PreflightError, match=r'images: of 4 images, 1 differ and have 200 pixels'):
        make_crops(tmp_path / 'out', [folder])
    assert not (tmp_path / 'out').exists()


def test_the_tool(folder, in_a_folder, capsys):
    tool = tiny_runs.load_tool('photographs:make_crops')
    arguments = '--images', folder, '--size', 16
    tiny_runs.call(tool, *arguments)
    assert 'data/crops/train 32 crops of 8 images' in capsys.readouterr().out and Path('data/crops/test').is_dir()
    tiny_runs.call(tool, *arguments)
    assert 'already exists' in capsys.readouterr().out
    for bad in ('--seed', -1), ('--size', 0), ('--images', 'nowhere', '--out', 'b'):
        with pytest.raises(SystemExit) as stop:
            tiny_runs.call(tool, *bad)
        assert stop.value.code == 2 and capsys.readouterr().err.strip().splitlines()[-1]
