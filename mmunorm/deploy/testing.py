"""An exported model in place of a model of torch, for the metrics of a config."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from mmengine.structures import InstanceData

from ..utils import PreflightError
from .runner import Runner


class ExportedModel:
    """What mmengine's test loop asks of a model, through a runtime.

    Args:
        runner (Runner): an exported classifier or detector.
    """

    def __init__(self, runner: Runner):
        self.runner = runner

    def test_step(self, batch: dict) -> list:
        """Predictions for a batch of a data loader, whose `inputs` are uint8 pictures `(3, h, w)`.

        Raises:
            PreflightError: a picture does not fit into the file's input.
        """
        outputs, samples = self.runner(*self.arrays(batch['inputs'])), batch['data_samples']
        return (self._detect if self.runner.is_detector else self._classify)(outputs, samples)

    def arrays(self, inputs: Sequence[torch.Tensor]) -> tuple[np.ndarray, ...]:
        """What the file takes, of pictures `(3, h, w)` uint8 of a data loader.

        Raises:
            PreflightError: a picture does not fit into the file's input.
        """
        pictures = [picture.numpy() for picture in inputs]
        if self.runner.is_detector:
            return self.runner.canvas(pictures)
        expected = tuple(self.runner.meta['shape'][2:])
        for picture in pictures:
            if expected[0] and picture.shape[1:] != expected:
                raise PreflightError(f'the config makes pictures of {picture.shape[1]} x {picture.shape[2]}, and the '
                                     f'file takes {expected[0]} x {expected[1]}: export with another --shape.')
        return (np.stack(pictures), )

    def _classify(self, outputs: dict[str, np.ndarray], samples: list) -> list:
        scores = outputs['scores']
        return [sample.set_pred_score(torch.from_numpy(score)).set_pred_label(int(score.argmax()))
                for sample, score in zip(samples, scores, strict=True)]

    def _detect(self, outputs: dict[str, np.ndarray], samples: list) -> list:
        for index, sample in enumerate(samples):
            own = {name: array[index] for name, array in outputs.items()}
            found = self.runner.detections(own, sample.scale_factor, *sample.ori_shape)
            fields = dict(bboxes=found.boxes, scores=found.scores, labels=found.labels)
            if found.masks is not None:
                fields['masks'] = found.masks
            sample.pred_instances = InstanceData(
                **{name: torch.from_numpy(array) for name, array in fields.items()})
        return samples
