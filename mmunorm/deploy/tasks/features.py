"""Detectors of mmdet up to their neck: images to maps. The rest stays in torch."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...utils import PreflightError
from ..graph import Pixels
from .base import Task


class FeaturesGraph(nn.Module):
    """A detector of mmdet up to its neck, in eval mode: `images` `(N, 3, H, W)` and `sizes` to maps `(N, C, h, w)`.

    `sizes` `(N, 2)` float32 are height and width of the images without padding.
    """
    inputs = ('images', 'sizes')

    def __init__(self, detector: nn.Module):
        super().__init__()
        self.pixels, self.detector = Pixels(detector.data_preprocessor), detector
        with torch.no_grad():
            maps = detector.extract_feat(torch.zeros(1, 3, 64, 64))
        self.outputs = tuple(f'map{index}' for index in range(len(maps)))

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
        return tuple(self.detector.extract_feat(self.pixels(images, sizes)))


class Features(Task):
    name = 'features'

    def graph(self, model: nn.Module) -> FeaturesGraph:
        if not hasattr(model, 'extract_feat') or not hasattr(model, 'with_bbox'):
            raise PreflightError(f'--parts backbone takes detectors of mmdet, and {type(model).__name__} is none.')
        return FeaturesGraph(model)

    def batch(self, images: Sequence[np.ndarray], meta: dict) -> tuple[np.ndarray, ...]:
        """As of a :class:`Classifier`: `images` `(N, 3, H, W)` and `sizes` `(N, 2)`, both float32."""
        images, (_, _, height, width) = [np.asarray(image) for image in images], meta['shape']
        sizes = np.array([image.shape[1:] for image in images], np.float32)
        batch = np.zeros((len(images), 3, height, width), np.float32)
        for target, image in zip(batch, images, strict=True):
            if image.shape[1] > height or image.shape[2] > width:
                raise PreflightError(f'an image of {image.shape[1]} x {image.shape[2]} pixels does not fit into '
                                     f'{height} x {width}: export with a larger --shape.')
            target[:, :image.shape[1], :image.shape[2]] = image
        return batch, sizes


class WithRest:
    """A detector, in eval mode, whose maps come from a file of its backbone and neck: its detections are torch's."""

    def __init__(self, runner, detector: nn.Module):
        self.runner, self.detector = runner, detector

    def test_step(self, batch: dict) -> list:
        """The interface of mmengine's test loop."""
        arrays = self.runner.task.batch(batch['inputs'], self.runner.meta)
        maps = tuple(map(torch.from_numpy, self.runner(*arrays).values()))
        data = self.detector.data_preprocessor(batch, False)
        for sample in data['data_samples']:  # heads that mask the padding ask for it
            sample.set_metainfo(dict(batch_input_shape=arrays[0].shape[2:], pad_shape=arrays[0].shape[2:]))
        self.detector.extract_feat = lambda inputs: maps
        try:
            return self.detector(**data, mode='predict')
        finally:
            del self.detector.extract_feat
