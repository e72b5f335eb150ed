"""Runs an exported model in its runtime, without building a torch model."""
from __future__ import annotations

from pathlib import Path

import numpy as np

from ..utils import PreflightError
from .formats import Session, format_of
from .preprocessing import apply_steps
from .tasks import TASKS, batch_of
from .tasks.detector.objects import Detections, detections


class ExportedModel:
    """An exported model, ready to run on the CPU.

    Args:
        file: the path of an exported model, such as a `.onnx` or a `.xml` file, or an open :class:`Session`.
        threads (int, optional): CPU threads, if `file` is a path. Defaults to the runtime's choice.

    Attributes:
        meta (dict): metadata of the file.
        classes (list[str]): names of the classes.
        task (Task): what it does.
        is_detector (bool): whether it is a detector.
        loading (dict): the arguments with which `mmcv.imread` reads images as its config does, such as their rotation.

    Raises:
        PreflightError: the file does not exist, its runtime is not installed, or it was not written by
            `tools/deploy/export.py`.
    """

    def __init__(self, file: str | Path | Session, threads: int | None = None):
        self._session = file if isinstance(file, Session) else format_of(file).open(Path(file), threads)
        self.meta = self._session.meta
        self.classes = self.meta['classes']
        self.task = TASKS[self.meta['task']]
        self.is_detector = self.task is TASKS['detector']
        self.loading = self.meta.get('loading', {})  # files of `mmunorm.export` have none

    def __call__(self, *arrays: np.ndarray) -> dict[str, np.ndarray]:
        """The file's outputs for any number `N` of images, by name, with `N` as first dimension.

        Its inputs are `images` `(N, 3, H, W)` float32 from 0 to 255, for a detector also `sizes` `(N, 2)` float32.
        """
        shape, (batch, *image) = np.shape(arrays[0]), self.meta['shape']
        if list(shape[1:]) != image:
            raise PreflightError(f'images must be (N, {", ".join(map(str, image))}), got {shape}.')
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
        """The interface of mmengine's test loop: the `data_samples` of a batch with predictions."""
        outputs = self(*batch_of(batch['inputs'], self.meta))
        for index, sample in enumerate(batch['data_samples']):
            self.task.predict(sample, {name: array[index] for name, array in outputs.items()}, self.meta)
        return batch['data_samples']

    def classify(self, image: np.ndarray) -> np.ndarray:
        """Class probabilities, `(classes, )` float32, of an image `(h, w, 3)` uint8 in BGR."""
        import mmcv
        image = apply_steps(image, self.meta['steps'])
        if not self.meta['bgr']:
            image = image[..., ::-1]
        _, _, height, width = self.meta['shape']
        image = mmcv.imresize(np.ascontiguousarray(image), (width, height))
        return self(image.transpose(2, 0, 1)[None])['scores'][0]

    def detect(self, image: np.ndarray, score_thr: float = 0.) -> Detections:
        """The objects in an image `(h, w, 3)` uint8 in BGR with at least the score `score_thr`."""
        import mmcv
        small = apply_steps(image, self.meta['steps'])
        _, _, height, width = self.meta['shape']
        shrink = min(1., height / small.shape[0], width / small.shape[1])
        if shrink < 1:
            small = mmcv.imresize(image, tuple(max(int(side * shrink), 1) for side in small.shape[1::-1]))
        outputs = self(*batch_of([small.transpose(2, 0, 1)], self.meta))
        scale = (small.shape[1] / image.shape[1], small.shape[0] / image.shape[0])
        return detections({name: array[0] for name, array in outputs.items()}, self.meta, scale, *image.shape[:2],
                          score_thr)
