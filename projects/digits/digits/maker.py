"""Small data sets of real handwritten digits in OpenMMLab's formats.

One is a COCO-format set of scenes for detection and instance segmentation. The other is an ImageNet-folder set for
classification. Its images are similar to the digits in the scenes, so a detector can start from a classifier's weights.
Both are made from data bundled with scikit-learn, without downloads.
"""
import numpy as np
from tqdm import tqdm

from .atomic_folder import atomic_folder, is_complete
from .contact_sheet import draw_contact_sheet
from .digit_scenes import SPLITS, draw_scene, draw_single, split_samples
from .scenes import save_image, write_scenes

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
# Must be incremented when a change of the code changes the files for the same settings.
VERSION = 2

LICENSES = [
    dict(id=1, name='Backgrounds: china.jpg by danielbuechele and flower.jpg by vultilion, CC BY 2.0',
         url='https://creativecommons.org/licenses/by/2.0/'),
    dict(id=2, name='Handwriting: Optical Recognition of Handwritten Digits, UCI, CC BY 4.0',
         url='https://creativecommons.org/licenses/by/4.0/'),
]


def check_settings(settings):
    """Raises a ValueError if a setting is not an integer within ``LIMITS``; the message begins with its name."""
    for name, (low, high) in LIMITS.items():
        if not isinstance(settings[name], int) or not low <= settings[name] <= high:
            raise ValueError(f'{name} must be a whole number from {low} to {high}, got {settings[name]!r}')


def make_digits(out, seed=0, train_scenes=1500, val_scenes=200, scene_size=128, train_images=6000, val_images=1000,
                image_size=32, force=False):
    """Make both sets in one folder, atomically. The same settings produce the same files.

    The folder has the scenes, ``coco/annotations/instances_{train,val}.json`` and ``coco/{train,val}/*.png``, and
    ``preview.png`` with annotated val scenes. Category k + 1 is the digit k. A mask is the visible part of its digit in
    the image (``iscrowd`` 0, compressed RLE), at least 60 % of it; box and area are those of the mask. ``digit_id`` is
    the index of its handwriting in ``sklearn.datasets.load_digits``. Train and val share no handwriting, over both
    sets. Scene k does not depend on the number of scenes.

    The classification set is ``imagenet/{train,val}/{0..9}/digitDDDD_N.png``: the N-th drawing of the handwriting with
    index DDDD, each with a random size, angle, place, background and colours. All handwriting is drawn once before any
    is repeated, and the classes alternate.

    Args:
        out (str | Path): the folder.
        seed (int): random seed.
        train_scenes, val_scenes, train_images, val_images (int): numbers of images.
        scene_size, image_size (int): side of a scene, and of an image for classification, in pixels.
        force (bool): whether to overwrite a folder that this function made before. It never touches any other folder
            that holds files.

    Returns:
        dict[str, int] | None: the number of digits in the scenes of each split; None if the folder exists
        with the same settings.

    Raises:
        ValueError: if a number is outside ``LIMITS``.
        FolderError: if the folder must not be overwritten; see ``atomic_folder.is_complete``.
    """
    settings = dict(seed=seed, train_scenes=train_scenes, val_scenes=val_scenes, scene_size=scene_size,
                    train_images=train_images, val_images=val_images, image_size=image_size)
    check_settings(settings)
    settings['version'] = VERSION
    if is_complete(out, settings, force):
        return None
    with atomic_folder(out, settings, force) as folder:
        counts = {}
        for split in SPLITS:
            samples = split_samples(split, seed)
            counts[split] = _write_digit_scenes(folder, split, samples, settings)
            _write_images(folder / 'imagenet' / split, split, samples, settings)
        draw_contact_sheet(folder / 'coco/annotations/instances_val.json', folder / 'coco/val', folder / 'preview.png')
    return counts


def _write_digit_scenes(folder, split, samples, settings):
    """Scenes in the COCO format in ``coco``. Returns the number of digits."""
    def draw(index):
        rng = np.random.default_rng([settings['seed'], 1, SPLITS.index(split), index])
        return draw_scene(rng, samples, split, settings['scene_size'])

    content = dict(
        info=dict(description=f'Handwritten digits on photographs, {split}', version=str(VERSION),
                  contributor='mmunorm'),
        licenses=LICENSES,
        categories=[dict(id=label + 1, name=name, supercategory='digit') for label, name in enumerate(CLASSES)])
    return write_scenes(folder / 'coco', split, settings[f'{split}_scenes'], draw, content)


def _write_images(folder, split, samples, settings):
    """Images of one digit each, in a folder for each class."""
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    for index in tqdm(range(settings[f'{split}_images']), f'{split} images', mininterval=0.5,
                      disable=None):
        drawing, rank = divmod(index, len(samples))
        sample = samples[rank]
        rng = np.random.default_rng([settings['seed'], 2, SPLITS.index(split), index])
        path = folder / CLASSES[sample.label] / f'digit{sample.digit_id:04d}_{drawing}.png'
        save_image(draw_single(rng, sample, split, settings['image_size']), path)
