"""Errors of data sets that name the unusable image."""
from __future__ import annotations

import cv2
from mmengine.dataset import Compose
from mmengine.runner import Runner

from ..utils import LocalError


def name_unusable_images(runner: Runner) -> None:
    """Makes the data sets of a Runner raise a LocalError that names an image which cannot be read or resized."""
    build = runner.build_dataloader

    def build_dataloader(*args, **kwargs):
        loader = build(*args, **kwargs)
        name_images(loader.dataset)
        return loader

    runner.build_dataloader = build_dataloader  # which every loop calls


def name_images(dataset) -> None:
    """Makes a data set, and those that it wraps, raise a LocalError that names an unusable image."""
    if isinstance(getattr(dataset, 'pipeline', None), Compose):
        dataset.pipeline = _NamingPipeline(dataset.pipeline)
    inner = getattr(dataset, 'dataset', None)
    for wrapped in [*(getattr(dataset, 'datasets', None) or []), *([] if inner is None else [inner])]:
        name_images(wrapped)


class _NamingPipeline(Compose):
    """A pipeline whose errors name the image."""

    def __init__(self, pipeline: Compose):
        self.transforms = pipeline.transforms

    def __call__(self, data: dict) -> dict | None:
        path = data.get('img_path')
        try:
            return super().__call__(data)
        except (AssertionError, OSError, cv2.error) as error:
            reason = image_problem(error)
            if path is None or reason is None:
                raise
            height, width = data.get('ori_shape') or (None, None)
            size = f' of {width} x {height} pixels' if width else ''
            raise LocalError(f'cannot use the image {path}{size}: {reason}.') from error


def image_problem(error: Exception) -> str | None:
    """What is wrong with an image; None if the error is about something else."""
    if isinstance(error, OSError):  # Pillow's has no `strerror`
        return error.strerror or _DAMAGED
    if isinstance(error, AssertionError):  # mmcv's, if OpenCV returns no image
        return _DAMAGED if 'failed to load image' in str(error) else None
    if error.func == 'imdecode_':
        return _DAMAGED
    return f'OpenCV refuses it ({error.err} in {error.func})'


_DAMAGED = 'it is empty, truncated, or not an image'
