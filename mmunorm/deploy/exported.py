"""Runs an exported model in its runtime, without building a torch model."""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..utils import PreflightError
from .formats import Session, format_of
from .images import apply_steps, batch_of, paste


@dataclass
class Detections:
    """The objects in one image, in pixels of the original image."""
    boxes: np.ndarray  # `(n, 4)` float32, x1 y1 x2 y2
    scores: np.ndarray  # `(n, )` float32, in descending order
    labels: np.ndarray  # `(n, )` int64, indices of `ExportedModel.classes`
    masks: np.ndarray | None = field(repr=False, default=None)  # `(n, height, width)` bool, if the model has some


class ExportedModel:
    """An exported model, ready to run on the CPU.

    Args:
        file: the path of an exported model, such as a `.onnx` or a `.xml` file, or an open :class:`Session`.
        threads (int, optional): CPU threads, if `file` is a path. Defaults to the runtime's choice.

    Attributes:
        meta (dict): metadata of the file.
        classes (list[str]): names of the classes.
        is_detector (bool): whether it is a detector, else a classifier.
        loading (dict): the arguments with which `mmcv.imread` reads images as its config does, such as their rotation.

    Raises:
        PreflightError: the file does not exist, its runtime is not installed, or it was not written by
            `tools/deploy/export.py`.
    """

    def __init__(self, file: str | Path | Session, threads: int | None = None):
        self._session = file if isinstance(file, Session) else format_of(file).open(Path(file), threads)
        self.meta = self._session.meta
        self.classes = self.meta['classes']
        self.is_detector = self.meta['task'] == 'detector'
        self.loading = self.meta.get('loading', {})  # older files have none

    def __call__(self, *arrays: np.ndarray) -> dict[str, np.ndarray]:
        """The file's outputs for any number `N` of images, by name, with `N` as first dimension.

        Args:
            *arrays: one for each of the file's inputs: `images` `(N, 3, H, W)` float32 from 0 to 255, for a detector
                also `sizes` `(N, 2)` float32.
        """
        shape, (batch, *image) = np.shape(arrays[0]), self.meta['shape']
        is_static = bool(image[1])
        if is_static and list(shape[1:]) != image:
            raise PreflightError(f'images must be (N, {", ".join(map(str, image))}), got {shape}.')
        if not is_static and any(side % self.meta['divisor'] for side in shape[2:]):
            raise PreflightError(f'height and width of images must be multiples of {self.meta["divisor"]}, got '
                                 f'{" x ".join(map(str, shape[2:]))}.')
        batch, parts = batch or shape[0], []
        for start in range(0, shape[0], batch):
            # ExecuTorch ignores strides, which transposed images have.
            part = [np.ascontiguousarray(array[start:start + batch], np.float32) for array in arrays]
            missing = batch - len(part[0])
            if missing:
                part = [np.concatenate([array, np.repeat(array[-1:], missing, 0)]) for array in part]
            parts.append([out[:batch - missing] for out in self._session.run(part)])
        return {name: np.concatenate(outs) for name, *outs in zip(self.meta['outputs'], *parts, strict=True)}

    def test_step(self, batch: dict) -> list:
        """The interface of mmengine's test loop: the `data_samples` of a batch with predictions.

        Raises a PreflightError if an image does not fit the file's input.
        """
        from mmengine.structures import InstanceData
        outputs = self(*batch_of(batch['inputs'], self.meta))
        for index, sample in enumerate(batch['data_samples']):
            out = {name: array[index] for name, array in outputs.items()}
            if not self.is_detector:
                sample.set_pred_score(torch.from_numpy(out['scores'])).set_pred_label(int(out['scores'].argmax()))
                continue
            found = self._detections(out, sample.scale_factor, *sample.ori_shape)
            fields = dict(bboxes=found.boxes, scores=found.scores, labels=found.labels, masks=found.masks)
            sample.pred_instances = InstanceData(**{name: torch.from_numpy(value) for name, value in fields.items()
                                                    if value is not None})
        return batch['data_samples']

    def classify(self, image: np.ndarray) -> np.ndarray:
        """Class probabilities, `(classes, )` float32, of an image `(h, w, 3)` uint8 in BGR."""
        import mmcv
        image = apply_steps(image, self.meta['steps'])
        if not self.meta['bgr']:
            image = image[..., ::-1]
        _, _, height, width = self.meta['shape']
        if not height:
            divisor = self.meta['divisor']
            height, width = (max(round(side / divisor), 1) * divisor for side in image.shape[:2])
        image = mmcv.imresize(np.ascontiguousarray(image), (width, height))
        return self(image.transpose(2, 0, 1)[None])['scores'][0]

    def detect(self, image: np.ndarray, score_thr: float = 0.) -> Detections:
        """The objects in an image `(h, w, 3)` uint8 in BGR with at least the score `score_thr`."""
        import mmcv
        small = apply_steps(image, self.meta['steps'])
        _, _, height, width = self.meta['shape']
        shrink = min(1., height / small.shape[0], width / small.shape[1]) if height else 1.
        if shrink < 1:
            small = mmcv.imresize(image, tuple(max(int(side * shrink), 1) for side in small.shape[1::-1]))
        outputs = self(*batch_of([small.transpose(2, 0, 1)], self.meta))
        scale = (small.shape[1] / image.shape[1], small.shape[0] / image.shape[0])
        return self._detections({name: array[0] for name, array in outputs.items()}, scale, *image.shape[:2],
                                score_thr)

    def _detections(self, outputs: dict[str, np.ndarray], scale: tuple[float, float], height: int, width: int,
                    score_thr: float = 0.) -> Detections:
        """The detections in pixels of the original image; `scale` is the model's image size over its (w, h)."""
        scores = outputs['dets'][:, 4]
        found = (scores > 0) & (scores >= score_thr)
        boxes = outputs['dets'][found, :4] / np.array([*scale, *scale], np.float32)
        masks = None
        if 'masks' in outputs:
            masks = np.zeros((len(boxes), height, width), bool)
            for pasted, mask, box in zip(masks, outputs['masks'][found], boxes, strict=True):
                pasted[:] = paste(mask, box, height, width, self.meta['mask_threshold'])
        return Detections(boxes, scores[found], outputs['labels'][found].astype(np.int64), masks)


class WithRest:
    """A detector, in eval mode, whose maps come from a file of its backbone and neck: its detections are torch's."""

    def __init__(self, runner: ExportedModel, detector: nn.Module):
        self.runner, self.detector = runner, detector

    def test_step(self, batch: dict) -> list:
        """The interface of mmengine's test loop."""
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
