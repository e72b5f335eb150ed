"""An exported model in place of a model of torch, for the metrics of a config."""
from __future__ import annotations

import numpy as np
import torch
from mmengine.structures import InstanceData

from .pictures import batch_of
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
        outputs, samples = self.runner(*batch_of(batch['inputs'], self.runner.meta)), batch['data_samples']
        return (self._detect if self.runner.is_detector else self._classify)(outputs, samples)

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
