"""Images of cut-out objects on photographs from Debian packages.

All functions are deterministic, given the state of a ``numpy.random.Generator``.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from projects.digits.digits.scenes import Cutout, add_cutout, compose, in_8_bits

# Longest side of an object as a share of the image's side.
SCENE_SIDE_RANGE = (28 / 128, 72 / 128)
SINGLE_SIDE_RANGE = (0.85, 1.)
MAX_ANGLE = 20.
MAX_OBJECTS = 6
# Sides in pixels that the sources are downscaled to, sufficient for images of 128 pixels.
STAMP_SIDE = 160
BACKGROUND_SIDE = 900

# Ranges of the illumination of an image. A dark image has a high gamma and a low gain.
GAMMA_RANGE = (0.6, 1.8)
GAIN_RANGE = (0.35, 1.)
CAST_RANGE = (0.85, 1.15)  # of each colour
NOISE_RANGE = (0., 5.)  # standard deviation, of 255


@dataclass(frozen=True)
class Stamp:
    """A cut-out object: its name, such as `animals/birds/crow`, its class and its image, RGBA."""
    name: str
    label: int
    image: Image.Image

    @property
    def origin(self):
        return dict(stamp=self.name)


def read_stamp(path: Path, name: str, label: int) -> Stamp:
    """A stamp from a PNG with transparency, cropped to its content."""
    image = Image.open(path).convert('RGBA')
    return Stamp(name, label, _reduced(image.crop(_box(image)), STAMP_SIDE))


def read_background(path: Path) -> Image.Image:
    """A photograph, RGB, with a longest side of at most `BACKGROUND_SIDE`."""
    image = Image.open(path)
    image.draft('RGB', (BACKGROUND_SIDE, BACKGROUND_SIDE))
    return _reduced(image.convert('RGB'), BACKGROUND_SIDE)


def _reduced(image, side):
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


def _box(image):
    """The bounding box of pixels that are more than half opaque."""
    return image.getchannel('A').point(lambda alpha: 255 * (alpha > 127)).getbbox()


def draw_background(rng, photographs, size):
    """A square part of a photograph, some mirrored, float32 `(size, size, 3)` in [0, 255]."""
    photograph = photographs[rng.integers(len(photographs))]
    shortest = min(photograph.size)
    side = round(np.exp(rng.uniform(np.log(min(1.5 * size, shortest)), np.log(shortest))))
    left, top = (int(rng.integers(extent - side + 1)) for extent in photograph.size)
    box = (left, top, left + side, top + side)
    image = photograph.resize((size, size), Image.Resampling.BICUBIC, box, reducing_gap=2)
    pixels = np.asarray(image, dtype=np.float32)
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def random_cutout(rng, stamp, size, sides, light):
    """A stamp at a random place inside an image of `size`, randomly rotated, stretched and mirrored."""
    image = stamp.image.rotate(rng.uniform(-MAX_ANGLE, MAX_ANGLE), Image.Resampling.BILINEAR, expand=True)
    image = image.crop(_box(image))
    extents = np.array(image.size) * np.exp(rng.uniform(-0.1, 0.1, size=2))
    extents *= np.exp(rng.uniform(*np.log(sides))) * size / extents.max()
    # Keeps thin objects visible.
    image = image.resize([max(3, int(extent)) for extent in extents], Image.Resampling.BICUBIC)
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.asarray(image, dtype=np.float32)
    height, width = pixels.shape[:2]
    top, left = (int(rng.integers(size - extent + 1)) for extent in (height, width))
    return Cutout(stamp, pixels[..., 3] / 255, top, left, np.clip(pixels[..., :3] * light, 0, 255))


def background_light(background):
    """The brightness factor of objects on a background."""
    return np.clip(np.sqrt(background.mean() / 110), 0.6, 1.2)


def illuminate(rng, image):
    """The image with random illumination, colour cast and sensor noise, uint8."""
    gamma, gain, noise = (rng.uniform(*bounds) for bounds in (GAMMA_RANGE, GAIN_RANGE, NOISE_RANGE))
    cast = rng.uniform(*CAST_RANGE, size=3)
    noisy = 255 * gain * cast * (image / 255)**gamma + rng.normal(scale=noise, size=image.shape)
    return in_8_bits(np.clip(noisy, 0, 255))


def draw_scene(rng, stamps, photographs, size):
    """One to six objects on a part of a photograph.

    Args:
        rng (np.random.Generator): source of randomness.
        stamps (Sequence[Sequence[Stamp]]): stamps of each class; the classes are equally frequent.
        photographs (Sequence[Image.Image]): the backgrounds.
        size (int): side of the square image in pixels.

    Returns:
        tuple[np.ndarray, np.ndarray, list[Cutout]]: the image, uint8 (size, size, 3), the owner of each pixel
        as in :func:`compose`, and the objects from the lowest to the topmost.
    """
    background = draw_background(rng, photographs, size)
    light = background_light(background)

    def draw():
        kind = stamps[rng.integers(len(stamps))]
        return random_cutout(rng, kind[rng.integers(len(kind))], size, SCENE_SIDE_RANGE, light)

    cutouts = []
    for _ in range(rng.integers(1, MAX_OBJECTS + 1)):
        add_cutout(background, cutouts, draw)
    image, owner = compose(background, cutouts)
    return illuminate(rng, image), owner, cutouts


def draw_single(rng, stamp, photographs, size):
    """One object that fills most of an image, uint8 `(size, size, 3)`, similar to objects in scenes."""
    background = draw_background(rng, photographs, size)
    cutout = random_cutout(rng, stamp, size, SINGLE_SIDE_RANGE, background_light(background))
    return illuminate(rng, compose(background, [cutout])[0])
