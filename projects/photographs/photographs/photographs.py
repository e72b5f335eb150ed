"""Data sets of cut-out objects on photographs in OpenMMLab's formats, made from images of Debian packages.

One is a COCO-format set of scenes for detection and instance segmentation, the other an ImageNet-folder set for
classification. Its images are similar to the objects in the scenes, so a detector can start from a classifier's
weights. Both have the splits train, val and test, with distinct objects and backgrounds.
"""
from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from mmunorm.utils import IMAGE_SUFFIXES, PreflightError
from projects.digits.digits.atomic_folder import atomic_folder, is_complete
from projects.digits.digits.contact_sheet import draw_contact_sheet
from projects.digits.digits.maker import check_settings
from projects.digits.digits.scenes import save_image, write_scenes
from projects.photographs.photographs.apt import fetch_packages

from .cutouts import Stamp, draw_scene, draw_single, read_background, read_stamp
from .stamps import BACKGROUNDS, STAMPS

CLASSES = tuple(sorted(STAMPS))
SPLITS = ('train', 'val', 'test')
# Of each kind, and of the backgrounds, one in HELD_OUT is in val and one in test.
HELD_OUT = 5
# Must be incremented when a change of the code changes the files for the same settings.
VERSION = 1

STAMP_PACKAGE = 'tuxpaint-stamps-default'
LICENCES = {
    STAMP_PACKAGE: 'GPL 2 or later',
    'plasma-workspace-wallpapers': 'GPL 2 or later',
    'mate-backgrounds': 'GPL 2 or later, and CC BY-SA 4.0',
    'lomiri-wallpapers-16.04': 'CC BY 4.0 and CC BY-SA 4.0',
}
HINT = ('unpack the packages ' + ', '.join(LICENCES) + ' of Debian elsewhere, and name the folders with --stamps '
        'and --backgrounds')


def find_stamps(folder: Path) -> list[list[tuple[str, Path]]]:
    """Name and file of the stamps of each class below a folder.

    Raises:
        PreflightError: a class has fewer than three, one for each split.
    """
    found = []
    for kind in CLASSES:
        names = [f'{part}/{name}' for part, listed in STAMPS[kind].items() for name in listed.split()]
        found.append([(name, path) for name in names if (path := folder / f'{name}.png').is_file()])
        if len(found[-1]) < len(SPLITS):
            raise PreflightError(
                f'--stamps {folder} has {len(found[-1])} of the {len(names)} stamps of the kind {kind}, such as '
                f'{names[0]}.png, and each split needs one: name the folder usr/share/tuxpaint/stamps of '
                f'{STAMP_PACKAGE}.')
    return found


def find_backgrounds(folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """Name and file of the backgrounds below some folders; the largest file of each.

    Raises:
        PreflightError: there are fewer than three, one for each split.
    """
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob('*')):
            name = path.parts[-4] if path.parent.name == 'images' else path.stem
            if name in BACKGROUNDS and path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
                found[name] = max(found.get(name, path), path, key=lambda file: file.stat().st_size)
    if len(found) < len(SPLITS):
        raise PreflightError(f'--backgrounds {" ".join(map(str, folders))}: of the {len(BACKGROUNDS)} photographs, '
                             f'such as {BACKGROUNDS[-1]}.jpg, {len(found)} are there, and each split needs one.')
    return [(name, found[name]) for name in BACKGROUNDS if name in found]


def split_sources(sources: Sequence, seed: int) -> dict[str, list]:
    """The sources of each split: a fifth, at least one, in each of val and test, and the others in train."""
    order = np.random.default_rng([seed, 0]).permutation(len(sources))
    count = max(1, round(len(sources) / HELD_OUT))
    indices = dict(val=order[:count], test=order[count:2 * count], train=order[2 * count:])
    return {split: [sources[i] for i in sorted(indices[split])] for split in SPLITS}


def make_photographs(out, stamps=None, backgrounds=(), seed=0, train_scenes=1500, val_scenes=200, scene_size=128,
                     train_images=12000, val_images=1000, image_size=32, force=False):
    """Make both sets in one folder, atomically.

    The folder has ``coco/``, ``imagenet/``, ``preview.png`` with annotated val scenes, and ``README.md`` with licence
    and checksum of each source file. The images are deterministic, given the arguments and source files.

    Args:
        out (str | Path): the folder.
        stamps (str | Path, optional): the folder of tuxpaint's stamps, such as /usr/share/tuxpaint/stamps. Defaults to
            None: apt downloads the packages, which are unpacked in `debian_images` next to `out`.
        backgrounds (Sequence[str | Path]): folders of the backgrounds; required with `stamps`.
        seed (int): random seed, also of the splits.
        train_scenes, val_scenes (int): number of scenes; test has as many as val.
        scene_size (int): side of a scene in pixels.
        train_images, val_images (int): number of images for classification; test has as many as val.
        image_size (int): side of such an image in pixels.
        force (bool): whether to overwrite a folder that this function made before.

    Returns:
        dict | None: `stamps`, `backgrounds` and `objects`, the number of each in each split; None if the folder exists
        with the same settings.

    Raises:
        ValueError: a number is outside ``digits.LIMITS``.
        PreflightError: source images are missing.
        FolderError: the folder must not be overwritten; see ``atomic_folder.is_complete``.
    """
    sizes = dict(seed=seed, train_scenes=train_scenes, val_scenes=val_scenes, scene_size=scene_size,
                 train_images=train_images, val_images=val_images, image_size=image_size)
    check_settings(sizes)
    settings = {**sizes, 'version': VERSION}
    if stamps is not None:
        settings.update(stamps=str(stamps), backgrounds=[str(folder) for folder in backgrounds])
    if is_complete(out, settings, force):
        return None
    if stamps is None:
        sources = Path(out).parent / 'debian_images'
        fetch_packages(sources, LICENCES, 'the images', HINT)
        stamps = sources / STAMP_PACKAGE / 'usr/share/tuxpaint/stamps'
        backgrounds = [sources / package for package in LICENCES if package != STAMP_PACKAGE]
    kinds = [split_sources(kind, seed) for kind in find_stamps(Path(stamps))]
    photographs = split_sources(find_backgrounds([Path(folder) for folder in backgrounds]), seed)
    counts = dict(stamps={split: sum(len(kind[split]) for kind in kinds) for split in SPLITS},
                  backgrounds={split: len(photographs[split]) for split in SPLITS}, objects={})
    with atomic_folder(out, settings, force) as folder:
        for split in SPLITS:
            drawer = _Drawer(split, seed, [[read_stamp(path, name, label) for name, path in kind[split]]
                                           for label, kind in enumerate(kinds)],
                             [read_background(path) for _, path in photographs[split]])
            held_out = 'train' if split == 'train' else 'val'
            counts['objects'][split] = write_scenes(
                folder / 'coco', split, sizes[f'{held_out}_scenes'],
                lambda index, drawer=drawer: drawer.scene(index, scene_size), _coco_content(split))
            drawer.write_images(folder / 'imagenet' / split, sizes[f'{held_out}_images'], image_size)
        draw_contact_sheet(folder / 'coco/annotations/instances_val.json', folder / 'coco/val', folder / 'preview.png')
        (folder / 'README.md').write_text(_readme(kinds, photographs), encoding='utf-8')
    return counts


class _Drawer:
    """Draws the images of a split; image k does not depend on the number of images."""

    def __init__(self, split: str, seed: int, stamps: list[list[Stamp]], photographs: list[Image.Image]):
        self.split, self.seed, self.stamps, self.photographs = split, seed, stamps, photographs

    def _rng(self, kind: int, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, kind, SPLITS.index(self.split), index])

    def scene(self, index: int, size: int):
        return draw_scene(self._rng(1, index), self.stamps, self.photographs, size)

    def write_images(self, folder: Path, count: int, size: int) -> None:
        """The classes take turns, and the stamps of a class do."""
        for kind in CLASSES:
            (folder / kind).mkdir(parents=True)
        for index in tqdm(range(count), f'{self.split} images', mininterval=0.5, disable=None):
            drawing, label = divmod(index, len(CLASSES))
            kind = self.stamps[label]
            stamp = kind[drawing % len(kind)]
            image = draw_single(self._rng(2, index), stamp, self.photographs, size)
            save_image(image, folder / CLASSES[label] / f'{os.path.basename(stamp.name)}_{drawing}.png')


def _coco_content(split: str) -> dict:
    return dict(
        info=dict(description=f'Cut-out objects on photographs, {split}', version=str(VERSION), contributor='mmunorm'),
        licenses=[dict(id=1, name='see README.md of this data set', url='')],
        categories=[dict(id=label + 1, name=name, supercategory='object') for label, name in enumerate(CLASSES)])


def _readme(kinds: list[dict[str, list]], photographs: dict[str, list]) -> str:
    lines = ['# Cut-out objects on photographs', '',
             'Made by `make_photographs.py` of mmunorm from images of these packages of Debian. Their '
             'licences hold for the images here, too; `usr/share/doc/PACKAGE/copyright` names the authors.', '',
             '| package | licence |', '|---|---|',
             *(f'| {package} | {licence} |' for package, licence in LICENCES.items()), '',
             'What was used, with the SHA-256 checksum of each file:', '', '| split | kind | image | SHA-256 |',
             '|---|---|---|---|']
    for split in SPLITS:
        for kind, found in [*zip(CLASSES, (kind[split] for kind in kinds), strict=True),
                            ('background', photographs[split])]:
            lines += [f'| {split} | {kind} | {name} | {hashlib.sha256(path.read_bytes()).hexdigest()} |'
                      for name, path in found]
    return '\n'.join([*lines, ''])
