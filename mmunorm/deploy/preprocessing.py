"""Preprocessing of images for an exported model, as the test pipeline of a config does it."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..utils import PreflightError
from .tasks import batch_of


def apply_steps(image: np.ndarray, steps: Sequence[dict]) -> np.ndarray:
    """An image `(h, w, 3)` uint8 after the steps of :func:`steps_of`; float32 if one of them is that."""
    import mmcv
    for step in steps:
        kind, size, sides = step['step'], step.get('size'), image.shape[:2]
        options = {name: step[name] for name in ('backend', 'interpolation') if name in step}
        if kind == 'float':
            image = image.astype(np.float32)
        elif kind == 'crop':
            top, left = (max(round((side - new) / 2), 0) for side, new in zip(sides, size, strict=True))
            image = image[top:top + size[0], left:left + size[1]]
        elif kind == 'within':  # a landscape or portrait frame
            image = mmcv.imrescale(image, tuple(size), **options)
        else:
            if kind == 'short_edge':
                size = [size if side == min(sides) else int(size * side / min(sides)) for side in sides]
            image = mmcv.imresize(image, tuple(size[::-1]), **options)
    return image


def steps_of(pipeline: Sequence[dict]) -> list[dict]:
    """The resizing steps of a test pipeline of mmpretrain or mmdet, as plain data for :func:`apply_steps`.

    Raises:
        ValueError: a transform is not supported.
    """
    steps = []
    for transform in pipeline:
        kind = transform['type'].rpartition('.')[2]
        options = {name: transform[name] for name in ('backend', 'interpolation') if name in transform}
        if kind == 'Resize':
            if (scale := transform.get('scale')) is None:
                raise ValueError(f'Resize without a scale: {dict(transform)}')
            sides = [scale, scale] if isinstance(scale, int) else list(scale)
            kept = transform.get('keep_ratio')
            steps.append(dict(step='within' if kept else 'resize',
                              size=sorted(sides, reverse=True) if kept else sides[::-1], **options))
        elif kind == 'ResizeEdge' and transform.get('edge', 'short') == 'short':
            steps.append(dict(step='short_edge', size=transform['scale'], **options))
        elif kind == 'CenterCrop' and not transform.get('auto_pad'):
            size = transform['crop_size']
            steps.append(dict(step='crop', size=[size, size] if isinstance(size, int) else [size[1], size[0]]))
        elif kind == 'LoadImageFromFile':
            if (color := transform.get('color_type', 'color')) not in ('color', 'color_ignore_orientation'):
                raise ValueError(f'LoadImageFromFile with color_type={color!r} is not supported by exported models')
            if transform.get('to_float32'):
                steps.append(dict(step='float'))
        elif kind == 'LoadMultiChannelImageFromFiles' or not (
                kind.startswith(('Load', 'Pack')) or kind in ('ToPIL', 'ToNumpy')):
            raise ValueError(f'{kind} is not supported by exported models')
    return steps


def loading_of(pipeline: Sequence[dict]) -> dict:
    """The arguments of `mmcv.imread` with which a test pipeline reads image files; {} if it reads none."""
    for transform in pipeline:
        if transform['type'].endswith('LoadImageFromFile'):
            return dict(flag=transform.get('color_type', 'color'), backend=transform.get('imdecode_backend', 'cv2'))
    return {}


class Samples(Sequence):
    """Batches of inputs of a file with the metadata `meta`, for INT8 calibration, made when they are read.

    `images` are uint8 `(3, h, w)`, such as the tensors of a data loader. An incomplete last batch is dropped. Raises a
    PreflightError if there is no whole batch.
    """

    def __init__(self, images: Sequence[np.ndarray], meta: dict, batch: int):
        if len(images) < batch:
            raise PreflightError(f'--int8 needs at least as many training images as the batch size, got {len(images)} '
                                 f'for --batch {batch}.')
        self._images, self._meta, self._batch = images, meta, batch

    def __len__(self) -> int:
        return len(self._images) // self._batch

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        part = self._images[range(len(self))[index] * self._batch:][:self._batch]
        return tuple(array.astype(np.float32) for array in batch_of(part, self._meta))
