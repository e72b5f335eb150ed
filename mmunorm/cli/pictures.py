"""Pictures on the command line: finding and reading them, and errors that name the one that cannot be used."""
from __future__ import annotations

import os
from pathlib import Path

import cv2
import mmcv
import numpy as np
from mmengine.dataset import Compose
from mmengine.runner import Runner

from ..errors import LocalError, PreflightError

SUFFIXES = {'.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp'}
# The visualizers' lines and letters have a fixed size, so a smaller picture is enlarged to be readable.
READABLE_SIDE = 512


def name_unusable_pictures(runner: Runner) -> None:
    """Makes the data sets of a Runner raise a LocalError that names a picture that cannot be read or resized."""
    build = runner.build_dataloader

    def build_dataloader(*args, **kwargs):
        loader = build(*args, **kwargs)
        name_pictures(loader.dataset)
        return loader

    runner.build_dataloader = build_dataloader  # which every loop calls


def name_pictures(dataset) -> None:
    """Makes a data set, and those inside of it, raise a LocalError that names an unusable picture."""
    if isinstance(getattr(dataset, 'pipeline', None), Compose):
        dataset.pipeline = _NamingPipeline(dataset.pipeline)
    inner = getattr(dataset, 'dataset', None)
    for wrapped in [*(getattr(dataset, 'datasets', None) or []), *([] if inner is None else [inner])]:
        name_pictures(wrapped)


class _NamingPipeline(Compose):
    """A pipeline whose errors name the picture."""

    def __init__(self, pipeline: Compose):
        self.transforms = pipeline.transforms

    def __call__(self, data: dict) -> dict | None:
        path = data.get('img_path')
        try:
            return super().__call__(data)
        except (AssertionError, OSError, cv2.error) as error:
            reason = picture_problem(error)
            if path is None or reason is None:
                raise
            height, width = data.get('ori_shape') or (None, None)
            size = f' of {width} x {height} pixels' if width else ''
            raise LocalError(f'cannot use the picture {path}{size}: {reason}.') from error


def picture_problem(error: Exception) -> str | None:
    """What an error says about a picture; None if it is about something else."""
    if isinstance(error, OSError):  # Pillow's has no text of the system's
        return error.strerror or _DAMAGED
    if isinstance(error, AssertionError):  # mmcv's, if OpenCV returns no picture
        return _DAMAGED if 'failed to load image' in str(error) else None
    if error.func == 'imdecode_':
        return _DAMAGED
    return f'OpenCV refuses it ({error.err} in {error.func})'


_DAMAGED = 'it is empty, cut off, or no picture'


def find_images(source: str, out_dir: str, limit: int | None = None) -> list[tuple[Path, Path]]:
    """The pictures at `source` with the paths that their drawings get under `out_dir`.

    Raises:
        PreflightError: there are none, or a drawing would overwrite its picture.
    """
    source, out_dir = Path(source), Path(out_dir)
    root = source if source.is_dir() else source.parent
    # Not Path.resolve, which raises an error on a link that leads to itself.
    drawn = Path(os.path.realpath(out_dir))
    if drawn == Path(os.path.realpath(root)):
        raise PreflightError(f'--out-dir {out_dir} is where the pictures are: they would be overwritten.')
    if source.is_dir():
        found = (path for path in source.rglob('*') if path.suffix.lower() in SUFFIXES)
        # An output folder inside the input folder holds the drawings of an earlier run.
        images = sorted(path for path in found if drawn not in Path(os.path.realpath(path)).parents)
    else:
        images = [source] if source.is_file() else []
    if not images:
        raise PreflightError(f'there is no picture at {source} (looked for {", ".join(sorted(SUFFIXES))}).')
    return [(path, out_dir / path.relative_to(root)) for path in images[:limit]]


def drawing_scale(height: int, width: int) -> float:
    """The factor that enlarges a picture before drawing: at least 1, and never to more than 2048 pixels."""
    return max(1.0, min(READABLE_SIDE / min(height, width), 2048 / max(height, width)))


def read_picture(path: Path) -> np.ndarray | None:
    """The picture as a uint8 BGR array, or None if it cannot be read."""
    try:
        return mmcv.imread(str(path))
    except (cv2.error, OSError):  # an empty file, or a link to nowhere
        return None
