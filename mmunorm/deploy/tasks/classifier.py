"""Classifiers of mmpretrain: images to the probabilities of classes."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...utils import PreflightError
from ..comparison import Comparison, tensor_differences
from ..graph import Pixels
from .base import Call, Task


class ClassifierGraph(nn.Module):
    """A complete classifier in eval mode: `images` `(N, 3, H, W)` float32, 0 to 255, to `scores` `(N, classes)`."""
    inputs = ('images', )
    outputs = ('scores', )

    def __init__(self, classifier: nn.Module):
        super().__init__()
        self.pixels = Pixels(classifier.data_preprocessor)
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(images).softmax(1)

    def logits(self, images: Tensor) -> Tensor:
        return self.classifier(self.pixels(images))


class Classifier(Task):
    name = 'classifier'

    def graph(self, model: nn.Module) -> ClassifierGraph:
        """The model, in eval mode, as a graph with the same parameters; a PreflightError if it cannot be exported."""
        from mmpretrain.models.classifiers import ImageClassifier
        from mmpretrain.models.heads import ClsHead
        head = getattr(model, 'head', None)
        if isinstance(model, ImageClassifier) and not (
                isinstance(head, ClsHead) and type(head).predict is ClsHead.predict
                and type(head)._get_predictions is ClsHead._get_predictions):
            raise PreflightError(f'{type(model).__name__} cannot be exported: its head is {type(head).__name__}, not '
                                 'one with class probabilities, such as LinearClsHead.')
        for name in ('forward', 'predict', 'test_step'):
            if not getattr(type(model), name).__module__.startswith(('mmpretrain.', 'mmengine.')):
                raise PreflightError(f'{type(model).__name__} cannot be exported: it has a {name} of its own.')
        return ClassifierGraph(model)

    @staticmethod
    def compute(graph: ClassifierGraph, images: Tensor) -> dict[str, Tensor]:
        return dict(logits=graph.logits(images))

    def run(self, meta: dict, call: Call, *arrays: np.ndarray) -> list[np.ndarray]:
        return [torch.from_numpy(call(*self.first(meta, *arrays))['logits']).softmax(1).numpy()]

    def batch(self, images: Sequence[np.ndarray], meta: dict) -> tuple[np.ndarray, ...]:
        """The inputs of a file for uint8 images `(3, h, w)`; a PreflightError if one does not fit."""
        images, (_, _, height, width) = [np.asarray(image) for image in images], meta['shape']
        for image in images:
            if image.shape[1:] != (height, width):
                raise PreflightError(f'the config resizes images to {image.shape[1]} x {image.shape[2]}, but the '
                                     f'file takes {height} x {width}; export with another --shape.')
        return (np.stack(images), )

    def predict(self, sample, outputs: dict[str, np.ndarray], meta: dict) -> None:
        """Writes the outputs for an image to a data sample of OpenMMLab."""
        scores = outputs['scores']
        sample.set_pred_score(torch.from_numpy(scores)).set_pred_label(int(scores.argmax()))

    def differences(self, got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> Comparison:
        return tensor_differences(got, expected, logits_of)


def logits_of(scores: np.ndarray) -> np.ndarray:
    """The logits of class probabilities `(N, classes)`, with a mean of 0."""
    logits = np.log(np.maximum(scores.astype(np.float64), 1e-30))
    return logits - logits.mean(1, keepdims=True)
