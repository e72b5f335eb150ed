"""Simulates dark versions of images, as captured by a camera in low light."""
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from mmunorm.utils import PreflightError
from projects.digits.digits.atomic_folder import atomic_folder, is_complete
from projects.digits.digits.contact_sheet import draw_contact_sheet
from projects.digits.digits.scenes import save_image

# Ranges of values that are drawn for each image.
GAMMA_RANGE = (2., 5.)
GAIN_RANGE = (0.5, 1.)
PHOTON_RANGE = (500., 4000.)  # that a white pixel collects
READ_NOISE_RANGE = (0.002, 0.01)  # standard deviation, of white


def darken(image, rng):
    """Applies gamma, gain, shot noise and read noise to an image, in 8 bits.

    Args:
        image (np.ndarray): uint8, of any shape.
        rng (np.random.Generator): source of randomness.

    Returns:
        np.ndarray: uint8 of the same shape.
    """
    gamma, gain, noise = (rng.uniform(*bounds) for bounds in (GAMMA_RANGE, GAIN_RANGE, READ_NOISE_RANGE))
    photons = np.exp(rng.uniform(*np.log(PHOTON_RANGE)))
    light = gain * (image / 255.)**gamma
    noisy = rng.poisson(light * photons) / photons + rng.normal(scale=noise, size=image.shape)
    return np.rint(np.clip(noisy, 0, 1) * 255).astype(np.uint8)


def make_dark(source, out, seed=0, force=False):
    """Makes a dark version of each image of a folder in COCO format, with the same names and annotations.

    Args:
        source (str | Path): the folder: `annotations/*.json`, and PNGs in `train` and `val`.
        out (str | Path): the output folder, written atomically.
        seed (int): random seed.
        force (bool): whether to overwrite a folder that this function created.

    Returns:
        int | None: the number of images; None if the folder exists with the same settings.

    Raises:
        PreflightError: `source` has no images, or `out` must not be written.
    """
    source = Path(source)
    images = [(split, index, path) for split, name in enumerate(('train', 'val'))
              for index, path in enumerate(sorted((source / name).glob('*.png')))]
    if not images:
        raise PreflightError(f'there is no image in {source}/train and val: make them with '
                             '`python projects/digits/tools/make_digits.py`.')
    settings = dict(source=str(source), seed=seed, images=len(images))
    if is_complete(out, settings, force):
        return None
    with atomic_folder(out, settings, force) as folder:
        for name in ('train', 'val', 'annotations'):
            (folder / name).mkdir()
        for path in (source / 'annotations').glob('*.json'):
            (folder / 'annotations' / path.name).write_bytes(path.read_bytes())
        for split, index, path in tqdm(images, 'dark images', disable=None):
            rng = np.random.default_rng([seed, 3, split, index])
            save_image(darken(np.asarray(Image.open(path)), rng), folder / path.relative_to(source))
        draw_contact_sheet(folder / 'annotations/instances_val.json', folder / 'val', folder / 'preview.png')
    return len(images)
