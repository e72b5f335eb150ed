"""Any detector of mmdet: pixels to the neck's maps as one file, and the rest of it in torch."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..utils import PreflightError
from .graphs import Pixels
from .images import batch_of

if TYPE_CHECKING:  # it imports this file
    from .exported import ExportedModel


class FeaturesGraph(nn.Module):
    """What a detector does up to its neck, in eval mode.

    Takes `images` `(N, 3, H, W)` float32, 0 to 255, with anything to their right and below, and `sizes` `(N, 2)`
    float32, height and width of the images themselves. Returns the neck's maps, `(N, C, h, w)` each.
    """
    inputs = ('images', 'sizes')

    def __init__(self, detector: nn.Module, num_maps: int):
        super().__init__()
        self.pixels, self.detector = Pixels(detector.data_preprocessor), detector
        self.outputs = tuple(f'map{index}' for index in range(num_maps))

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        """The maps of images with values from 0 to 255."""
        return tuple(self.detector.extract_feat(self.pixels.padded(images, sizes)))


def features_of(detector: nn.Module) -> FeaturesGraph:
    """The first part of a detector as a graph to export.

    Raises:
        PreflightError: it is no detector of mmdet, or its backbone does not take 64 x 64 pixels.
    """
    if not hasattr(detector, 'extract_feat') or not hasattr(detector, 'with_bbox'):
        raise PreflightError(f'--parts backbone takes detectors of mmdet, and {type(detector).__name__} is none.')
    with torch.no_grad():
        return FeaturesGraph(detector, len(detector.extract_feat(torch.zeros(1, 3, 64, 64))))


class WithRest:
    """A detector whose maps come from a file and whose detections are torch's.

    Args:
        runner (ExportedModel): of a file with :class:`FeaturesGraph`.
        detector (nn.Module): the whole one, in eval mode.
    """

    def __init__(self, runner: ExportedModel, detector: nn.Module):
        self.runner, self.detector = runner, detector

    def test_step(self, batch: dict) -> list:
        """Predictions as mmengine's test loop asks a model for them."""
        arrays = batch_of(batch['inputs'], self.runner.meta)
        maps = tuple(map(torch.from_numpy, self.runner(*arrays).values()))
        data = self.detector.data_preprocessor(batch, False)
        for sample in data['data_samples']:  # heads that mask the padding ask for it
            sample.set_metainfo(dict(batch_input_shape=arrays[0].shape[2:], pad_shape=arrays[0].shape[2:]))
        self.detector.extract_feat = lambda inputs: maps
        try:
            return self.detector(**data, mode='predict')
        finally:
            del self.detector.extract_feat
