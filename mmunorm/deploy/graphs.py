"""The graphs to export: from the pixels of a batch of images to plain arrays."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..utils import PreflightError


class Pixels(nn.Module):
    """Normalizes and pads images like the `data_preprocessor` of a model of mmpretrain or mmdet.

    If the preprocessor has a method `enhance(images, sizes)`, as in projects/low_light, it is called first.
    """

    def __init__(self, preprocessor: nn.Module):
        super().__init__()
        self.enhancing = preprocessor if hasattr(preprocessor, 'enhance') else None
        # The names in mmpretrain and mmengine differ.
        self.flips = bool(getattr(preprocessor, 'to_rgb', getattr(preprocessor, '_channel_conversion', False)))
        normalizes = preprocessor._enable_normalize
        self.register_buffer('mean', preprocessor.mean.float() if normalizes else torch.zeros(3, 1, 1))
        self.register_buffer('std', preprocessor.std.float() if normalizes else torch.ones(3, 1, 1))
        self.divisor = getattr(preprocessor, 'pad_size_divisor', 1)
        self.pad_value = float(getattr(preprocessor, 'pad_value', 0))  # of normalized pixels
        self.normalization: nn.Module | None = None  # replaces the arithmetic, see :func:`.edge.fold_pixels`

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> Tensor:
        """`(N, 3, H, W)` float32, 0 to 255, to the same shape, or to multiples of `pad_size_divisor`.

        `sizes` `(N, 2)` are the unpadded image sizes.
        """
        if self.enhancing is not None:
            images = self.enhancing.enhance(images, sizes)
        if self.normalization is not None:
            images = self.normalization(images)
        else:
            images = ((images.flip(1) if self.flips else images) - self.mean) / self.std
        if self.divisor == 1:
            return images
        below, right = ((self.divisor - side % self.divisor) % self.divisor for side in images.shape[2:])
        return F.pad(images, (0, right, 0, below), value=self.pad_value) if below or right else images

    def padded(self, images: Tensor, sizes: Tensor) -> Tensor:
        """The same for images of these sizes, with `pad_value` beside each, as mmdet pads after the normalization."""
        rows = torch.arange(images.shape[2], device=images.device)[:, None] < sizes[:, 0, None, None]
        columns = torch.arange(images.shape[3], device=images.device) < sizes[:, 1, None, None]
        return torch.where((rows & columns)[:, None], self(images, sizes), self.pad_value)


def outputs_by_name(graph: nn.Module, inputs: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """What a graph computes for some inputs."""
    with torch.no_grad():
        out = graph(*inputs)
    out = out if isinstance(out, tuple) else (out, )
    return {name: tensor.numpy() for name, tensor in zip(graph.outputs, out, strict=True)}


class ModelGraph(nn.Module):
    """Any model of one input tensor, from `images` to its output tensors by name."""
    inputs = ('images', )

    def __init__(self, model: nn.Module, outputs: Sequence[str], pixels: Pixels | None = None):
        super().__init__()
        self.model, self.outputs, self.pixels = model, tuple(outputs), pixels

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Takes the model's input `(N, C, H, W)`, or with `pixels` values from 0 to 255."""
        if self.pixels is not None:
            images = self.pixels(images)
        return tuple(named_outputs(self.model(images)).values())


def named_outputs(out, name: str = '') -> dict[str, Tensor]:
    """The output tensors of a model by name. Raises a PreflightError if one is no tensor, or two have one name."""
    if isinstance(out, Tensor):
        return {name or 'output': out}
    if out is None:
        return {}
    if not isinstance(out, (Mapping, tuple, list)):
        raise PreflightError(f'the model returns {name or "a value"} of type {type(out).__name__}; it must return a '
                             'tensor, or a tuple or dict of tensors.')
    found, prefix = {}, f'{name}_' if name else '' if isinstance(out, Mapping) else 'output'
    for key, value in out.items() if isinstance(out, Mapping) else enumerate(out):
        inner = named_outputs(value, f'{prefix}{key}')
        if same := found.keys() & inner.keys():
            raise PreflightError(f'the model returns two tensors that a file would name {sorted(same)[0]}: rename a '
                                 'key of its dicts.')
        found |= inner
    return found


class ClassifierGraph(nn.Module):
    """A complete mmpretrain classifier in eval mode: `images` `(N, 3, H, W)` float32 to `scores` `(N, classes)`."""
    inputs = ('images', )
    outputs = ('scores', )

    def __init__(self, classifier: nn.Module):
        super().__init__()
        self.pixels = Pixels(classifier.data_preprocessor)
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        """The class probabilities for images with values from 0 to 255."""
        return self.logits(images).softmax(1)

    def logits(self, images: Tensor) -> Tensor:
        """The logits, before the softmax of :meth:`forward`."""
        return self.classifier(self.pixels(images))


class DetectorGraph(nn.Module):
    """A complete detector of mmdet in eval mode.

    Takes `images` `(N, 3, H, W)` float32, with any padding on the right and at the bottom, and `sizes` `(N, 2)`
    float32, height and width of the images without padding. Returns the outputs of :func:`.rcnn.postprocess.detect`.
    """
    inputs = ('images', 'sizes')

    def __init__(self, detector: nn.Module):
        from .rcnn.parts import Features, region_networks, settings_of
        super().__init__()
        self.pixels = Pixels(detector.data_preprocessor)
        self.detector = detector
        self.settings = settings_of(detector, self.pixels)
        self.features = Features(detector, self.pixels)
        self.networks = nn.ModuleDict(region_networks(detector))
        self.outputs = ('dets', 'labels', 'masks') if 'masks' in self.networks else ('dets', 'labels')

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        """Detections of images with values from 0 to 255."""
        from .rcnn.postprocess import detect
        return detect(self.settings, self.run, self.features(images, sizes), sizes)

    def run(self, name: str, regions: Tensor, found: Tensor) -> dict[str, Tensor]:
        """The `Run` of :mod:`.rcnn.postprocess`."""
        return self.networks[name](regions)


class FeaturesGraph(nn.Module):
    """A detector of mmdet up to its neck, in eval mode: inputs as :class:`DetectorGraph`'s to maps `(N, C, h, w)`.

    Raises a PreflightError if it is no detector of mmdet.
    """
    inputs = ('images', 'sizes')

    def __init__(self, detector: nn.Module):
        super().__init__()
        if not hasattr(detector, 'extract_feat') or not hasattr(detector, 'with_bbox'):
            raise PreflightError(f'--parts backbone takes detectors of mmdet, and {type(detector).__name__} is none.')
        self.pixels, self.detector = Pixels(detector.data_preprocessor), detector
        with torch.no_grad():
            maps = detector.extract_feat(torch.zeros(1, 3, 64, 64))
        self.outputs = tuple(f'map{index}' for index in range(len(maps)))

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.detector.extract_feat(self.pixels.padded(images, sizes)))


def graph_of(model: nn.Module) -> ClassifierGraph | DetectorGraph:
    """The complete model, in eval mode, as a graph with the same parameters.

    Raises a PreflightError if it is neither an mmpretrain classifier nor an mmdet detector, or has a part that cannot
    be exported.
    """
    from mmpretrain.models.classifiers import BaseClassifier, ImageClassifier
    from mmpretrain.models.heads import ClsHead

    from .rcnn.parts import obstacle
    name = type(model).__name__
    if isinstance(model, ImageClassifier):
        head = model.head
        if not isinstance(head, ClsHead) or type(head)._get_predictions is not ClsHead._get_predictions:
            raise PreflightError(f'{name} cannot be exported: its head is {type(head).__name__}, not one with class '
                                 'probabilities, such as LinearClsHead.')
    if isinstance(model, BaseClassifier):
        return ClassifierGraph(model)
    if not hasattr(model, 'with_bbox'):
        raise PreflightError(f"{name} cannot be exported; supported are mmpretrain's classifiers, and "
                             "RetinaNet, FasterRCNN, MaskRCNN and CascadeRCNN of mmdet.")
    if reason := obstacle(model):
        raise PreflightError(f'{name} cannot be exported whole: {reason}. With --parts backbone in onnx or openvino, '
                             'backbone and neck become a file, and the rest stays in torch.')
    return DetectorGraph(model)
