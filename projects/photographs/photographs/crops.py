"""Unlabelled square crops of Debian's images, to calibrate and adapt converted models.

Flat images, small images and near-duplicates are ignored. Train and test have crops of different images.
"""
from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from mmunorm.utils import IMAGE_SUFFIXES, PreflightError
from projects.digits.digits.atomic_folder import atomic_folder, is_complete
from projects.photographs.photographs.apt import fetch_packages

SPLITS = ('train', 'test')
TEST_EVERY = 8  # one image in so many
# Minimum shorter side of an image, and minimum number of colours of its thumbnail with 4 bits per channel.
SHORTEST, COLOURS = 200, 250
# Minimum side of a crop; the number of crops of an image is its area over this area, within the bounds.
SMALLEST_CROP, CROPS = 224, (4, 60)
# Images are near-duplicates if the mean difference of their thumbnails of 4 x 4 pixels is below this.
MAX_DIFFERENCE = 4.
# Must be incremented when a change of the code changes the files for the same settings.
VERSION = 1

PACKAGES = (
    'plasma-workspace-wallpapers', 'mate-backgrounds', 'lomiri-wallpapers-16.04', 'lomiri-wallpapers-20.04',
    'ukui-wallpapers', 'gnome-backgrounds', 'jigzo-data', 'palapeli-data', 'gcompris-qt-data', 'opencv-doc',
    'stellarium-data', 'supertuxkart-data')
HINT = 'name folders of your own images with --images'
# Magic bytes of JPEG, PNG and WebP files.
_IMAGE = re.compile(rb'\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF.{4}WEBP', re.DOTALL)


class Source(NamedTuple):
    """An image file, or an image in a Qt resource file, `size` bytes from `start`."""
    name: str
    path: Path
    start: int = 0
    size: int = -1

    def read(self) -> bytes:
        with self.path.open('rb') as file:
            file.seek(self.start)
            return file.read(self.size)

    def open(self) -> Image.Image:
        """The image in RGB, with transparent pixels on grey.

        Raises:
            OSError: it is not an image. Pillow raises various other errors for damaged files.
        """
        image = Image.open(io.BytesIO(self.read()))
        if 'A' in image.getbands() or 'transparency' in image.info:
            image = image.convert('RGBA')
            return Image.alpha_composite(Image.new('RGBA', image.size, (128, 128, 128)), image).convert('RGB')
        return image.convert('RGB')


def find_images(folder: Path) -> list[Source]:
    """The images below a folder, by name; the largest of wallpapers in several sizes, `NAME/contents/images*/`."""
    found: dict[str, Source] = {}
    for path in sorted(folder.rglob('*')):
        if path.is_symlink() or not path.is_file():
            continue
        name = str(path.relative_to(folder))
        if path.suffix == '.rcc':
            found.update({source.name: source for source in _images_inside(path, name)})
        elif path.suffix.lower() in IMAGE_SUFFIXES:
            if path.parent.name.startswith('images') and path.parts[-3] == 'contents':
                name = str(path.parents[2].relative_to(folder))
            found[name] = max(found.get(name, Source(name, path)), Source(name, path),
                              key=lambda source: source.path.stat().st_size)
    return [found[name] for name in sorted(found)]


def _images_inside(path: Path, name: str) -> Iterator[Source]:
    """Images that Qt's resource compiler stored uncompressed, each after four bytes with its size."""
    data = path.read_bytes()
    for match in _IMAGE.finditer(data):
        start = match.start()
        size = int.from_bytes(data[max(start - 4, 0):start], 'big')
        if match.end() - start < size <= len(data) - start:
            yield Source(f'{name}:{start}', path, start, size)


def varied_images(sources: Sequence[Source]) -> list[Source]:
    """The images that are large and colourful enough, without near-duplicates: of those, the largest stays."""
    found = []
    for source in tqdm(sources, 'reading', unit='image', mininterval=0.5, disable=None):
        try:
            image = source.open()
        except Exception:  # packages have files with image suffixes that are not images
            continue
        if min(image.size) < SHORTEST:
            continue
        tiny = np.asarray(image.resize((4, 4), Image.Resampling.BOX), np.float32).ravel()
        image.thumbnail((256, 256))
        colours = np.asarray(image).reshape(-1, 3) // 16 @ np.array([256, 16, 1])
        if np.count_nonzero(np.bincount(colours)) >= COLOURS:
            found.append((-len(source.read()), source.name, source, tiny))
    kept, thumbnails = [], np.empty((len(found), 48), np.float32)
    for _, _, source, tiny in sorted(found, key=lambda source: source[:2]):
        if not (np.abs(thumbnails[:len(kept)] - tiny).mean(1) < MAX_DIFFERENCE).any():
            thumbnails[len(kept)] = tiny
            kept.append(source)
    return sorted(kept, key=lambda source: source.name)


def crops_of(image: Image.Image, rng: np.random.Generator, size: int) -> Iterator[Image.Image]:
    """Crops of an image at random places and scales, resized to `size` x `size` pixels."""
    short = min(image.size)
    smallest = min(SMALLEST_CROP, short)
    for _ in range(int(np.clip(image.width * image.height / SMALLEST_CROP**2, *CROPS))):
        side = round(np.exp(rng.uniform(np.log(smallest), np.log(short))))
        left, top = (int(rng.integers(0, length - side + 1)) for length in image.size)
        box = left, top, left + side, top + side
        yield image.resize((size, size), Image.Resampling.BICUBIC, box)


def make_crops(out, images=(), seed=0, size=256, force=False):
    """Make a folder of unlabelled crops, atomically.

    The folder has ``train/`` and ``test/`` with a JPEG ``IMAGE_CROP.jpg`` per crop, and ``README.md`` with number,
    origin and checksum of each image. The crops are deterministic, given the arguments and the images.

    Args:
        out (str | Path): the folder.
        images (Sequence[str | Path]): folders of images. Defaults to none: apt downloads `PACKAGES`, which are unpacked
            in `debian_images` next to `out`.
        seed (int): random seed of the splits, and the places and scales of the crops.
        size (int): side of a crop in pixels.
        force (bool): whether to overwrite a folder that this function made before.

    Returns:
        dict | None: `images` and `crops`, the number of each in each split; None if the folder exists with the same
        settings.

    Raises:
        PreflightError: there are too few images, or apt cannot download them.
        FolderError: the folder must not be overwritten; see ``atomic_folder.is_complete``.
    """
    settings = dict(seed=seed, size=size, version=VERSION, images=[str(folder) for folder in images])
    if is_complete(out, settings, force):
        return None
    folders = [Path(folder) for folder in images]
    if not folders:
        root = Path(out).parent / 'debian_images'
        fetch_packages(root, PACKAGES, 'the images', HINT)
        folders = [root / package for package in PACKAGES]
    found = [source._replace(name=f'{folder.name}/{source.name}')
             for folder in folders for source in find_images(folder)]
    with warnings.catch_warnings():  # for large images and palettes
        warnings.filterwarnings('ignore', module='PIL')
        kept = varied_images(found)
        if len(kept) < 2:
            raise PreflightError(f'--images {" ".join(map(str, folders))}: of {len(found)} images, {len(kept)} differ '
                                 f'and have {SHORTEST} pixels a side and {COLOURS} colours; each split needs one.')
        order = np.random.default_rng(seed).permutation(len(kept))
        test = set(order[:max(1, len(kept) // TEST_EVERY)].tolist())
        counts = dict(images=dict(train=len(kept) - len(test), test=len(test)), crops=dict.fromkeys(SPLITS, 0))
        with atomic_folder(out, settings, force) as folder:
            for split in SPLITS:
                (folder / split).mkdir()
            rows = []
            for number, source in enumerate(tqdm(kept, 'cutting', unit='image', mininterval=0.5,
                                                 disable=None)):
                split = 'test' if number in test else 'train'
                crops = crops_of(source.open(), np.random.default_rng([seed, number]), size)
                for index, crop in enumerate(crops):
                    crop.save(folder / split / f'{number:05}_{index:02}.jpg', quality=92)
                    counts['crops'][split] += 1
                rows.append(f'| {number:05} | {split} | {source.name} | {hashlib.sha256(source.read()).hexdigest()} |')
            (folder / 'README.md').write_text('\n'.join([*_README, *rows, '']), encoding='utf-8')
    return counts


_README = [
    '# Unlabelled crops', '',
    'Made by `make_crops.py` of mmunorm. `IMAGE_CROP.jpg` is a crop of the image with that number. The '
    'licences of the images hold for the crops, too; of a Debian package, `usr/share/doc/PACKAGE/copyright` names them '
    'and the authors.', '', '| number | split | image | SHA-256 |', '|---|---|---|---|']
