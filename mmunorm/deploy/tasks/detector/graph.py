"""A detector of mmdet as one graph, and as the parts of a file."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ...graph import Pixels
from ...rewrite.pixels import fold_pixels
from .parts import Features, region_networks, settings_of
from .postprocess import detect

# The batch sizes of RoI heads in a file; the last batch is filled, so masks, of few detections, have a smaller one.
REGIONS = dict(heads=100, masks=20)


class DetectorGraph(nn.Module):
    """A complete detector of mmdet in eval mode.

    Takes `images` `(N, 3, H, W)` float32, with any padding on the right and at the bottom, and `sizes` `(N, 2)`
    float32, height and width of the images without padding. Returns the outputs of :func:`.postprocess.detect`.
    """
    inputs = ('images', 'sizes')

    def __init__(self, detector: nn.Module):
        super().__init__()
        self.pixels = Pixels(detector.data_preprocessor)
        self.detector = detector
        self.settings = settings_of(detector, self.pixels)
        self.features = Features(detector, self.pixels)
        self.networks = nn.ModuleDict(region_networks(detector))
        self.outputs = ('dets', 'labels', 'masks') if 'masks' in self.networks else ('dets', 'labels')

    @property
    def meta(self) -> dict:
        return dict(detector=self.settings)

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        """Detections of images with values from 0 to 255."""
        return detect(self.settings, self.run, self.features(images, sizes), sizes)

    def run(self, name: str, regions: Tensor, found: Tensor) -> dict[str, Tensor]:
        """The `Run` of :mod:`.postprocess`."""
        return self.networks[name](regions)


class ChannelsLast(nn.Module):
    """A network with its input and its output maps `(N, h, w, C)`."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        outs = self.network(*(x.permute(0, 3, 1, 2) for x in inputs.values()))
        return {name: out.permute(0, 2, 3, 1) if out.dim() == 4 else out for name, out in outs.items()}


def parts_of(graph: DetectorGraph, images: Tensor) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
    """`features` and :func:`region_networks` as parts of a file, channels last, each with a sample of its input.

    The normalization of pixels is folded into the first layer. `images` is a sample `(N, 3, H, W)` float32.
    """
    parts = dict(features=(fold_pixels(graph.features, images), dict(images=images.permute(0, 2, 3, 1).contiguous())))
    if graph.networks:
        settings = graph.settings
        stage, masks, most = settings['stages'][0], settings['masks'], settings['rcnn']['max_per_img']
        heads = _regions(stage['pool'], min(REGIONS['heads'], settings['dense_head']['max_per_img']))
        for name, network in graph.networks.items():
            parts[name] = network, heads if name != 'masks' else _regions(masks['pool'], min(REGIONS['masks'], most))
    return {name: (ChannelsLast(network), sample) for name, (network, sample) in parts.items()}


def _regions(pool: dict, number: int) -> dict[str, Tensor]:
    return dict(regions=torch.zeros(number, *pool['output_size'], pool['channels']))
