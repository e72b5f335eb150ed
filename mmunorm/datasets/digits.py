"""Small real data sets of handwritten digits, in the formats that OpenMMLab reads.

One is a COCO-format set of scenes for detection and instance segmentation. The other is an ImageNet-folder set for
classification. Its pictures look like the digits in the scenes, so a detector can start from a classifier's weights.
Both come from data that scikit-learn bundles: nothing is downloaded. The scenes can be had in the dark, too.
"""
import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask
from tqdm import tqdm

from .contact_sheet import draw_contact_sheet
from .darkness import darken
from .digit_scenes import SPLITS, compose, draw_scene, draw_single, split_samples
from .made_folder import is_made, making_folder, settings_of

CLASSES = tuple('0123456789')

# Lowest and highest value of each setting.
LIMITS = {
    'seed': (0, 2**32 - 1),
    'train_scenes': (1, 999999),
    'val_scenes': (1, 999999),
    'scene_size': (64, 1024),
    'train_images': (1, 999999),
    'val_images': (1, 999999),
    'image_size': (16, 512),
}
# Goes up when the code changes and the same settings give other files.
VERSION = 2

LICENSES = [
    dict(id=1, name='Backgrounds: china.jpg by danielbuechele and flower.jpg by vultilion, CC BY 2.0',
         url='https://creativecommons.org/licenses/by/2.0/'),
    dict(id=2, name='Handwriting: Optical Recognition of Handwritten Digits, UCI, CC BY 4.0',
         url='https://creativecommons.org/licenses/by/4.0/'),
]


def check_setting(name, value, label=None):
    """Raise ValueError if the value of a setting is not a whole number within ``LIMITS``.

    Args:
        name (str): the setting.
        value: its value.
        label (str, optional): what to call it in the message. Defaults to its name.
    """
    low, high = LIMITS[name]
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f'{label or name} must be a whole number from {low} to {high}, got {value!r}')


def _checked(**settings):
    for name, value in settings.items():
        check_setting(name, value)
    return settings


def make_detection_set(folder, seed=0, train_scenes=1500, val_scenes=200, scene_size=128, progress=True):
    """Write scenes of one to five digits in the COCO format.

    ``folder`` gets ``annotations/instances_{train,val}.json``, ``train/*.png`` and ``val/*.png``.
    Category k + 1 is the digit k. A mask is exactly what is visible of its digit in the picture
    (``iscrowd`` 0, compressed RLE), and box and area are those of the mask. At least 60 % of a
    digit is visible. Beside COCO's keys, an annotation has ``digit_id``, the index of its
    handwriting in ``sklearn.datasets.load_digits``; train and val of one seed share none. The same
    arguments give the same files; scene k does not depend on how many there are.

    Args:
        folder (str | Path): where to write; made if it is missing.
        seed (int): decides everything random.
        train_scenes, val_scenes (int): how many scenes.
        scene_size (int): side of a scene in pixels.
        progress (bool): whether to show progress bars.

    Returns:
        dict[str, int]: the number of digits in each split.

    Raises:
        ValueError: if a number is outside ``LIMITS``.
    """
    settings = _checked(seed=seed, train_scenes=train_scenes, val_scenes=val_scenes, scene_size=scene_size)
    folder = Path(folder)
    (folder / 'annotations').mkdir(parents=True, exist_ok=True)
    counts = {}
    for split in SPLITS:
        (folder / split).mkdir(exist_ok=True)
        samples = split_samples(split, seed)
        images, annotations = [], []
        for index in tqdm(range(settings[f'{split}_scenes']), f'{split} scenes',
                          mininterval=0.5, disable=None if progress else True):
            rng = np.random.default_rng([seed, 1, SPLITS.index(split), index])
            background, glyphs = draw_scene(rng, samples, split, scene_size)
            picture, owner = compose(background, glyphs)
            image = dict(id=index + 1, file_name=f'{index + 1:06d}.png', width=scene_size, height=scene_size, license=1)
            _save(picture, folder / split / image['file_name'])
            images.append(image)
            for order, glyph in enumerate(glyphs):
                # COCO's evaluation takes annotation id 0 for "no match".
                annotations.append(dict(id=len(annotations) + 1, image_id=image['id'],
                                        **_annotation(owner == order, glyph.sample)))
        _write_coco(folder / 'annotations' / f'instances_{split}.json', split, images, annotations)
        counts[split] = len(annotations)
    return counts


def make_classification_set(folder, seed=0, train_images=6000, val_images=1000, image_size=32, progress=True):
    """Write pictures of one digit each in ImageNet's layout of one folder a class.

    ``folder`` gets ``{train,val}/{0..9}/digitDDDD_N.png``: the N-th drawing of the handwriting with
    index DDDD in ``sklearn.datasets.load_digits``. Each drawing has another size, angle and place,
    other colours and another background. Train and val of one seed share no handwriting. The split
    is that of ``make_detection_set``. The same arguments give the same files.

    Args:
        folder (str | Path): where to write; made if it is missing.
        seed (int): decides everything random.
        train_images, val_images (int): how many pictures. Every sample is drawn once before any is
            drawn again, and the classes take turns.
        image_size (int): side of a picture in pixels.
        progress (bool): whether to show progress bars.

    Raises:
        ValueError: if a number is outside ``LIMITS``.
    """
    settings = _checked(seed=seed, train_images=train_images, val_images=val_images, image_size=image_size)
    folder = Path(folder)
    for split in SPLITS:
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True, exist_ok=True)
        samples = split_samples(split, seed)
        for index in tqdm(range(settings[f'{split}_images']), f'{split} images',
                          mininterval=0.5, disable=None if progress else True):
            drawing, rank = divmod(index, len(samples))
            sample = samples[rank]
            rng = np.random.default_rng([seed, 2, SPLITS.index(split), index])
            name = f'digit{sample.digit_id:04d}_{drawing}.png'
            _save(draw_single(rng, sample, split, image_size), folder / split / CLASSES[sample.label] / name)


def make_dark_set(folder, light, seed=0, progress=True):
    """Write dark versions of the scenes of ``make_detection_set``, under the same names and with the same annotations.

    Args:
        folder (str | Path): where to write; made if it is missing.
        light (str | Path): the folder of the scenes.
        seed (int): decides everything random; scene k does not depend on how many there are.
        progress (bool): whether to show progress bars.
    """
    folder, light = Path(folder), Path(light)
    shutil.copytree(light / 'annotations', folder / 'annotations')
    for split in SPLITS:
        (folder / split).mkdir()
        for path in tqdm(sorted((light / split).iterdir()), f'dark {split}', mininterval=0.5,
                         disable=None if progress else True):
            rng = np.random.default_rng([seed, 3, SPLITS.index(split), int(path.stem) - 1])
            _save(darken(np.asarray(Image.open(path)), rng), folder / split / path.name)


def make_digits(out, seed=0, train_scenes=1500, val_scenes=200, scene_size=128, train_images=6000, val_images=1000,
                image_size=32, dark=False, force=False, progress=True):
    """Make both sets in one folder, as a whole or not at all.

    The folder gets ``coco/`` (``make_detection_set``), ``imagenet/`` (``make_classification_set``)
    and ``preview.png``, annotated val scenes.

    Args:
        out (str | Path): the folder.
        dark (bool): whether it also gets ``coco_dark/`` (``make_dark_set``) and ``preview_dark.png``. A folder that has
            them keeps them.
        force (bool): whether to overwrite a folder that this function made before. It never touches
            any other folder that holds files.
        Others: as for ``make_detection_set`` and ``make_classification_set``.

    Returns:
        dict[str, int] | None: the number of digits in the scenes of each split; None if the folder
        is already there with the same settings.

    Raises:
        ValueError: if a number is outside ``LIMITS``.
        FolderError: if the folder must not be written; see ``made_folder.is_made``.
    """
    detection = dict(train_scenes=train_scenes, val_scenes=val_scenes, scene_size=scene_size)
    classification = dict(train_images=train_images, val_images=val_images, image_size=image_size)
    settings = {**_checked(seed=seed, **detection, **classification), 'version': VERSION}
    if dark or not force and settings_of(out) == {**settings, 'dark': True}:
        settings['dark'] = True
    if is_made(out, settings, force):
        return None
    with making_folder(out, settings, force) as folder:
        counts = make_detection_set(folder / 'coco', seed, **detection, progress=progress)
        make_classification_set(folder / 'imagenet', seed, **classification, progress=progress)
        draw_contact_sheet(folder / 'coco/annotations/instances_val.json', folder / 'coco/val',
                           folder / 'preview.png')
        if dark:
            make_dark_set(folder / 'coco_dark', folder / 'coco', seed, progress=progress)
            draw_contact_sheet(folder / 'coco/annotations/instances_val.json', folder / 'coco_dark/val',
                               folder / 'preview_dark.png')
    return counts


def _annotation(mask, sample):
    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    left, top = int(columns[0]), int(rows[0])
    return dict(
        category_id=sample.label + 1, bbox=[left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top],
        area=int(mask.sum()), iscrowd=0,
        segmentation=dict(size=list(mask.shape), counts=rle['counts'].decode('ascii')), digit_id=sample.digit_id)


def _write_coco(path, split, images, annotations):
    content = dict(
        info=dict(description=f'Handwritten digits on photographs, {split}', version=str(VERSION),
                  contributor='mmunorm'),
        licenses=LICENSES, images=images, annotations=annotations,
        categories=[dict(id=label + 1, name=name, supercategory='digit') for label, name in enumerate(CLASSES)])
    path.write_text(json.dumps(content), encoding='utf-8')


def _save(picture, path):
    # Fast compression: noise hardly compresses, and making the sets takes half as long.
    Image.fromarray(np.rint(picture).astype(np.uint8)).save(path, compress_level=1)
