"""Pictures of handwritten digits on photographs, drawn from scikit-learn's bundled data.

Everything here is a function of a ``numpy.random.Generator``: the same generator state gives the
same picture. The handwriting is ``sklearn.datasets.load_digits`` (1797 digits of 8x8 cells, values
0 to 16), the backgrounds are ``sklearn.datasets.load_sample_images`` (two photographs).
"""
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw
from scipy.ndimage import affine_transform
from sklearn.datasets import load_digits, load_sample_images

SPLITS = ('train', 'val')
# Of every class, one sample in VAL_EVERY is a val sample.
VAL_EVERY = 5
# Train uses a photograph left of this fraction of its width, val uses the rest.
PHOTO_CUT = 0.64

# Heights as a share of the picture's side. In a picture of 128 pixels, a digit is legible from a height of about 20.
# The largest digits leave room for others.
SCENE_HEIGHT_RANGE = (20 / 128, 56 / 128)
SINGLE_HEIGHT_RANGE = (0.6, 0.85)
# Far below 45 degrees, so that 6 and 9, and 4 and 9, stay different.
MAX_ANGLE = 15.
MAX_DIGITS = 5
# The share of a digit's mask that must stay visible under later digits. A place that would hide more is not used.
# So every digit in a picture is visible enough to be annotated.
MIN_VISIBLE = 0.6
MAX_BOX_IOU = 0.3


@dataclass(frozen=True)
class Sample:
    """One handwritten digit: its index in ``load_digits``, its class and its 8x8 cells in [0, 1]."""
    digit_id: int
    label: int
    cells: np.ndarray


@dataclass(frozen=True)
class Glyph:
    """A digit as it lies in a picture. ``alpha`` (h, w) in [0, 1] has its top left corner at
    (``top``, ``left``). ``colours`` are the RGB colours (3,) of its upper and its lower end."""
    sample: Sample
    alpha: np.ndarray
    top: int
    left: int
    colours: tuple

    @property
    def mask(self):
        return self.alpha > 0.5

    @property
    def window(self):
        height, width = self.alpha.shape
        return slice(self.top, self.top + height), slice(self.left, self.left + width)


def split_samples(split, seed):
    """The samples of a split. Train and val of one seed share none.

    Classes take turns in the list, so a few samples in a row already have many classes.

    Args:
        split (str): 'train' or 'val'.
        seed (int): chooses which samples are val samples.

    Returns:
        list[Sample]: about four fifths of the 1797 samples for train, the others for val.
    """
    digits = load_digits()
    rng = np.random.default_rng([seed, 0])
    ranked = []
    for label in range(10):
        shuffled = rng.permutation(np.flatnonzero(digits.target == label))
        count = len(shuffled) // VAL_EVERY
        chosen = shuffled[:count] if split == 'val' else shuffled[count:]
        ranked += [(rank, label, int(index)) for rank, index in enumerate(chosen)]
    return [
        Sample(index, label, digits.images[index] / 16) for _, label, index in sorted(ranked)
    ]


@cache
def photo_regions(split):
    """The part of each photograph that a split may use, uint8 (h, w, 3). Train and val share no
    pixel."""
    regions = []
    for photo in load_sample_images().images:
        cut = round(photo.shape[1] * PHOTO_CUT)
        regions.append(photo[:, :cut] if split == 'train' else photo[:, cut:])
    return tuple(regions)


def draw_background(rng, split, size, share=1.):
    """A darkened crop of a photograph with jittered colours and a little clutter drawn over it.

    Args:
        rng (np.random.Generator): decides everything.
        split (str): 'train' or 'val': which part of the photographs may be used.
        size (int): side of the square picture in pixels.
        share (float): share of a scene's side that the picture represents.

    Returns:
        np.ndarray: float32 (size, size, 3) in [0, 255].
    """
    regions = photo_regions(split)
    region = regions[rng.integers(len(regions))]
    side = min(round(size * rng.uniform(0.6, 1.8)), *region.shape[:2])
    top = rng.integers(region.shape[0] - side + 1)
    left = rng.integers(region.shape[1] - side + 1)
    crop = region[top:top + side, left:left + side]
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
    # Clutter is drawn at twice the size: the reduction smooths its edges.
    picture = Image.fromarray(np.ascontiguousarray(crop)).resize((2 * size, 2 * size),
                                                                 Image.Resampling.BICUBIC)
    draw_clutter(rng, picture, share)
    pixels = np.asarray(picture.resize((size, size), Image.Resampling.BOX), dtype=np.float32)
    mean = pixels.mean(axis=(0, 1))
    pixels = mean + (pixels - mean) * rng.uniform(0.6, 1.1)
    pixels = pixels * rng.uniform(0.8, 1.2, size=3) * rng.uniform(0.3, 0.5)
    pixels = pixels + rng.normal(scale=rng.uniform(0, 6), size=pixels.shape)
    return np.clip(pixels, 0, 255).astype(np.float32)


def draw_clutter(rng, picture, share):
    """Draw strokes, arcs and blobs on a PIL picture, in place: up to six on a whole scene."""
    draw = ImageDraw.Draw(picture)
    side = picture.width / share
    for _ in range(rng.integers(round(6 * share) + 1)):
        shape = rng.integers(3)
        x, y = (int(v) for v in rng.integers(picture.width, size=2))
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
    """Draw 8x8 cells at a size of about ``height`` pixels, turned and sheared at random.

    Returns:
        np.ndarray: float (h, w) in [0, 1], trimmed to where it is above 0.5. The edge of a stroke
        is about one pixel wide.
    """
    scale = height / 8
    angle = np.deg2rad(rng.uniform(-MAX_ANGLE, MAX_ANGLE))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    shape = np.array([[1, 0], [rng.uniform(-0.15, 0.15), rng.uniform(0.85, 1.2)]])
    # Rows and columns of the picture from those of the cells, and back.
    inverse = np.linalg.inv(scale * turn @ shape)
    padded = np.pad(cells, 2)
    side = int(np.ceil(1.8 * height))
    offset = (np.array(padded.shape) - 1) / 2 - inverse @ np.full(2, (side - 1) / 2)
    # A cell holds the share of ink in it, so half the ink is the edge of the stroke.
    ink = affine_transform(padded, inverse, offset, output_shape=(side, side), order=3)
    alpha = np.clip((ink - rng.uniform(0.4, 0.5)) * scale + 0.5, 0, 1)
    rows, columns = (np.flatnonzero((alpha > 0.5).any(axis=axis)) for axis in (1, 0))
    return alpha[rows[0]:rows[-1] + 1, columns[0]:columns[-1] + 1]


def pick_colours(rng):
    """The RGB colours of a digit's upper and lower end: light and close to each other, like chalk."""
    colour = rng.uniform(210, 255) + rng.uniform(-45, 10, size=3)
    return tuple(np.clip(colour + rng.uniform(-15, 15, size=(2, 3)), 0, 255))


def compose(background, glyphs):
    """Lay glyphs over a background, each over those before it.

    Args:
        background (np.ndarray): (H, W, 3) in [0, 255].
        glyphs (Sequence[Glyph]): from the lowest to the topmost.

    Returns:
        tuple[np.ndarray, np.ndarray]: the picture, float32 (H, W, 3), and the owner of each pixel,
        int (H, W): -1 for the background, else the index of the topmost glyph whose mask has it.
    """
    picture = background.astype(np.float32)
    owner = np.full(background.shape[:2], -1)
    for index, glyph in enumerate(glyphs):
        upper, lower = glyph.colours
        ramp = np.linspace(0, 1, len(glyph.alpha))[:, None, None]
        alpha = glyph.alpha[..., None]
        colour = (1 - ramp) * upper + ramp * lower
        picture[glyph.window] = (1 - alpha) * picture[glyph.window] + alpha * colour
        owner[glyph.window][glyph.mask] = index
    return picture, owner


def box_iou(first, second):
    """Intersection over union of the boxes of two glyphs."""
    inner = 1
    for a, b in zip(first.window, second.window, strict=True):
        inner *= max(0, min(a.stop, b.stop) - max(a.start, b.start))
    return inner / (first.alpha.size + second.alpha.size - inner)


def leaves_visible(glyphs, glyph, owner):
    """Whether every one of ``glyphs`` stays visible enough with ``glyph`` on top of them."""
    if any(box_iou(glyph, other) > MAX_BOX_IOU for other in glyphs):
        return False
    owner = owner.copy()
    owner[glyph.window][glyph.mask] = len(glyphs)
    return all((owner == index).sum() >= MIN_VISIBLE * other.mask.sum()
               for index, other in enumerate(glyphs))


def random_glyph(rng, sample, size, heights):
    """A sample at a random place of a picture of ``size``, wholly inside it, in a light colour."""
    height = width = size + 1
    # A turned digit can be larger than the height that was asked for.
    while max(height, width) > size:
        alpha = draw_alpha(rng, sample.cells, np.exp(rng.uniform(*np.log(heights))))
        height, width = alpha.shape
    top, left = (int(rng.integers(size - extent + 1)) for extent in (height, width))
    return Glyph(sample, alpha, top, left, pick_colours(rng))


def draw_scene(rng, samples, split, size):
    """One to five digits on a background.

    Args:
        rng (np.random.Generator): decides everything.
        samples (Sequence[Sample]): what may be drawn.
        split (str): 'train' or 'val': which part of the photographs may be used.
        size (int): side of the square picture in pixels.

    Returns:
        tuple[np.ndarray, list[Glyph]]: the background, float32 (size, size, 3), and the glyphs from
        the lowest to the topmost. ``compose`` makes the picture of them.
    """
    background = draw_background(rng, split, size)
    heights = np.array(SCENE_HEIGHT_RANGE) * size
    glyphs = []
    _, owner = compose(background, glyphs)
    for _ in range(rng.integers(1, MAX_DIGITS + 1)):
        # A crowded scene may find no place: it then keeps fewer digits.
        for _ in range(10):
            sample = samples[rng.integers(len(samples))]
            glyph = random_glyph(rng, sample, size, heights)
            if leaves_visible(glyphs, glyph, owner):
                glyphs.append(glyph)
                _, owner = compose(background, glyphs)
                break
    return background, glyphs


def draw_single(rng, sample, split, size):
    """One digit that fills most of a picture, looking as digits do in scenes.

    Returns:
        np.ndarray: float32 (size, size, 3) in [0, 255].
    """
    background = draw_background(rng, split, size, share=0.35)
    glyph = random_glyph(rng, sample, size, np.array(SINGLE_HEIGHT_RANGE) * size)
    return compose(background, [glyph])[0]
