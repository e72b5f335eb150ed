"""Images of handwritten digits on photographs, made from data bundled with scikit-learn.

All functions are deterministic, given the state of a generator. The handwriting is ``sklearn.datasets.load_digits``,
1797 digits of 8x8 cells. The backgrounds are the two photographs of ``sklearn.datasets.load_sample_images``.
"""
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw
from scipy.ndimage import affine_transform
from sklearn.datasets import load_digits, load_sample_images

from .scenes import Cutout, add_cutout, compose, in_8_bits

SPLITS = ('train', 'val')
# In each class, one in VAL_EVERY samples is for val.
VAL_EVERY = 5
# Train uses a photograph left of this fraction of its width, val uses the rest.
PHOTO_CUT = 0.64

# Heights as a share of the image's side. In an image of 128 pixels, a digit is legible from a height of about 20.
# The largest digits leave space for others.
SCENE_HEIGHT_RANGE = (20 / 128, 56 / 128)
SINGLE_HEIGHT_RANGE = (0.6, 0.85)
# Far below 45 degrees, so that 6 and 9, and 4 and 9, remain distinct.
MAX_ANGLE = 15.
MAX_DIGITS = 5


@dataclass(frozen=True)
class Sample:
    """One handwritten digit: its index in ``load_digits``, its class and its 8x8 cells in [0, 1]."""
    digit_id: int
    label: int
    cells: np.ndarray

    @property
    def origin(self):
        return dict(digit_id=self.digit_id)


def split_samples(split, seed):
    """The samples of 'train', about four fifths, or of 'val', the others, split by the seed.

    Classes alternate in the list, so a few consecutive samples have many classes.
    """
    digits = load_digits()
    rng = np.random.default_rng([seed, 0])
    ranked = []
    for label in range(10):
        shuffled = rng.permutation(np.flatnonzero(digits.target == label))
        count = len(shuffled) // VAL_EVERY
        chosen = shuffled[:count] if split == 'val' else shuffled[count:]
        ranked += [(rank, label, int(index)) for rank, index in enumerate(chosen)]
    return [Sample(index, label, digits.images[index] / 16) for _, label, index in sorted(ranked)]


@cache
def photo_regions(split):
    """The part of each photograph that a split may use, uint8 (h, w, 3). Train and val share no pixel."""
    regions = []
    for photo in load_sample_images().images:
        cut = round(photo.shape[1] * PHOTO_CUT)
        regions.append(photo[:, :cut] if split == 'train' else photo[:, cut:])
    return tuple(regions)


def draw_background(rng, split, size, share=1.):
    """A darkened crop of a photograph with jittered colours and clutter, float32 (size, size, 3) in [0, 255].

    It represents ``share`` of a scene's side.
    """
    regions = photo_regions(split)
    region = regions[rng.integers(len(regions))]
    side = min(round(size * rng.uniform(0.6, 1.8)), *region.shape[:2])
    top = rng.integers(region.shape[0] - side + 1)
    left = rng.integers(region.shape[1] - side + 1)
    crop = region[top:top + side, left:left + side]
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
    # Clutter is drawn at twice the size for antialiasing.
    image = Image.fromarray(np.ascontiguousarray(crop)).resize((2 * size, 2 * size), Image.Resampling.BICUBIC)
    draw_clutter(rng, image, share)
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BOX), dtype=np.float32)
    mean = pixels.mean(axis=(0, 1))
    pixels = mean + (pixels - mean) * rng.uniform(0.6, 1.1)
    pixels = pixels * rng.uniform(0.8, 1.2, size=3) * rng.uniform(0.3, 0.5)
    pixels = pixels + rng.normal(scale=rng.uniform(0, 6), size=pixels.shape)
    return np.clip(pixels, 0, 255).astype(np.float32)


def draw_clutter(rng, image, share):
    """Draws strokes, arcs and blobs on a PIL image, in place: up to six on a whole scene."""
    draw = ImageDraw.Draw(image)
    side = image.width / share
    for _ in range(rng.integers(round(6 * share) + 1)):
        shape = rng.integers(3)
        x, y = (int(v) for v in rng.integers(image.width, size=2))
        width, height = (int(v) for v in rng.uniform(0.08, 0.4, size=2) * side)
        colour = tuple(int(v) for v in rng.integers(256, size=3))
        thickness = max(1, round(side * rng.uniform(0.008, 0.025)))
        if shape == 0:
            x_end = x + int(rng.choice((-1, 1))) * width
            draw.line((x, y, x_end, y + height), fill=colour, width=thickness)
        elif shape == 1:
            start = int(rng.integers(360))
            end = start + int(rng.integers(40, 160))
            draw.arc((x, y, x + width, y + height), start, end, fill=colour, width=thickness)
        else:
            draw.ellipse((x, y, x + width // 3, y + height // 3), fill=colour)


def draw_alpha(rng, cells, height):
    """8x8 cells at a size of about ``height`` pixels, turned and sheared at random: float (h, w) in [0, 1], trimmed to
    where it is above 0.5. The edge of a stroke is about one pixel wide."""
    scale = height / 8
    angle = np.deg2rad(rng.uniform(-MAX_ANGLE, MAX_ANGLE))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    shape = np.array([[1, 0], [rng.uniform(-0.15, 0.15), rng.uniform(0.85, 1.2)]])
    # From rows and columns of the image to those of the cells.
    inverse = np.linalg.inv(scale * turn @ shape)
    padded = np.pad(cells, 2)
    side = int(np.ceil(1.8 * height))
    offset = (np.array(padded.shape) - 1) / 2 - inverse @ np.full(2, (side - 1) / 2)
    # A cell holds the share of ink in it, so half the ink is the edge of the stroke.
    ink = affine_transform(padded, inverse, offset, output_shape=(side, side), order=3)
    alpha = np.clip((ink - rng.uniform(0.4, 0.5)) * scale + 0.5, 0, 1)
    rows, columns = (np.flatnonzero((alpha > 0.5).any(axis=axis)) for axis in (1, 0))
    return alpha[rows[0]:rows[-1] + 1, columns[0]:columns[-1] + 1]


def random_glyph(rng, sample, size, height_range):
    """A sample at a random place inside an image of ``size``, in a light colour like chalk."""
    while True:
        alpha = draw_alpha(rng, sample.cells, np.exp(rng.uniform(*np.log(np.array(height_range) * size))))
        if max(alpha.shape) <= size:  # a rotated digit may be larger than the requested height
            break
    top, left = (int(rng.integers(size - extent + 1)) for extent in alpha.shape)
    colour = rng.uniform(210, 255) + rng.uniform(-45, 10, size=3)
    upper, lower = np.clip(colour + rng.uniform(-15, 15, size=(2, 3)), 0, 255)
    ramp = np.linspace(0, 1, len(alpha))[:, None, None]
    return Cutout(sample, alpha, top, left, (1 - ramp) * upper + ramp * lower)


def draw_scene(rng, samples, split, size):
    """One to five of ``samples`` on a background of a split: the image, uint8 (size, size, 3), the owners as
    ``compose`` returns them, and the glyphs from the lowest to the topmost."""
    background = draw_background(rng, split, size)
    glyphs = []
    for _ in range(rng.integers(1, MAX_DIGITS + 1)):
        add_cutout(background, glyphs,
                   lambda: random_glyph(rng, samples[rng.integers(len(samples))], size, SCENE_HEIGHT_RANGE))
    image, owner = compose(background, glyphs)
    return in_8_bits(image), owner, glyphs


def draw_single(rng, sample, split, size):
    """One digit that fills most of an image, similar to digits in scenes: uint8 (size, size, 3)."""
    background = draw_background(rng, split, size, share=0.35)
    image, _ = compose(background, [random_glyph(rng, sample, size, SINGLE_HEIGHT_RANGE)])
    return in_8_bits(image)
