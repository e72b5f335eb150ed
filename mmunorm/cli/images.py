"""Images on the command line: finding, reading and drawing them."""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import mmcv
import numpy as np
from tqdm import tqdm

from ..engine.images import image_problem
from ..utils import IMAGE_SUFFIXES, PreflightError, whole_file


def find_images(source: str, out_dir: str, limit: int | None = None) -> list[tuple[Path, Path]]:
    """The images at `source` with the paths that their drawings get under `out_dir`.

    Raises:
        PreflightError: there are none, or a drawing would overwrite its image.
    """
    source, out_dir = Path(source), Path(out_dir)
    root = source if source.is_dir() else source.parent
    # Not Path.resolve, which raises an error on a link that leads to itself.
    drawn = Path(os.path.realpath(out_dir))
    if drawn == Path(os.path.realpath(root)):
        raise PreflightError(f'--out-dir {out_dir} is where the images are: they would be overwritten.')
    if source.is_dir():
        found = (path for path in source.rglob('*') if path.suffix.lower() in IMAGE_SUFFIXES)
        # An output folder inside the input folder holds the drawings of an earlier run.
        images = sorted(path for path in found if drawn not in Path(os.path.realpath(path)).parents)
    else:
        images = [source] if source.is_file() else []
    if not images:
        raise PreflightError(f'there is no image at {source} (looked for {", ".join(sorted(IMAGE_SUFFIXES))}).')
    return [(path, out_dir / path.relative_to(root)) for path in images[:limit]]


def draw_each(images: Sequence[tuple[Path, Path]], draw: Callable[[Path, np.ndarray, Path], object],
              out_dir: str) -> None:
    """Draws the images of :func:`find_images`, and says at the end which ones were skipped and why.

    `draw(path, image, out_file)` writes the drawing of an image, which is uint8 BGR; `out_dir` is for the message.

    Raises:
        PreflightError: none could be drawn.
    """
    skipped = []
    for path, out_file in tqdm(images, desc='drawing', unit='image', disable=None):
        image = read_image(path)
        if image is None:
            skipped.append(f'{path}: not readable as an image')
            continue
        out_file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out_file) as part:
            try:
                draw(path, image, part)
            except cv2.error as error:
                height, width = image.shape[:2]
                skipped.append(f'{path} ({width} x {height} pixels): {image_problem(error)}')
    if len(skipped) == len(images):
        raise PreflightError(f'no image could be drawn: {"; ".join(skipped)}.')
    if skipped:
        print(f'skipped: {"; ".join(skipped)}')
    print(f'{len(images) - len(skipped)} images are in {out_dir}')


def drawing_scale(height: int, width: int) -> float:
    """The factor that enlarges an image before drawing: to a short side of 512, and a long one of 2048 at most.

    The visualizers' lines and letters have a fixed size.
    """
    return max(1.0, min(512 / min(height, width), 2048 / max(height, width)))


def read_image(path: Path) -> np.ndarray | None:
    """The image as a uint8 BGR array, or None if it cannot be read."""
    try:
        return mmcv.imread(str(path))
    except (cv2.error, OSError):  # an empty file, or a link to nowhere
        return None
