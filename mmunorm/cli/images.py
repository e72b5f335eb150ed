"""Finds, reads and draws images for the command-line tools."""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import cv2
import mmcv
import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.visualization import DetLocalVisualizer
from mmengine.structures import InstanceData
from mmengine.visualization import Visualizer
from mmpretrain.structures import DataSample
from mmpretrain.visualization import UniversalVisualizer
from tqdm import tqdm

from ..utils import IMAGE_SUFFIXES, PreflightError, plural, whole_file, write_text


def draw_objects(image: np.ndarray, classes: Sequence[str] | None, labels: np.ndarray, scores: np.ndarray | None = None,
                 boxes: np.ndarray | None = None, masks: np.ndarray | None = None) -> np.ndarray:
    """Draws detected objects or a class on an image, with the visualizers of mmdet and mmpretrain.

    `image` is uint8 BGR `(h, w, 3)`, as the result; a small one is enlarged so that labels are readable. `labels` are
    int `(n, )`, one for each object. `boxes` are x1 y1 x2 y2 `(n, 4)` in pixels, `scores` `(n, )`, and `masks` bool
    `(n, h, w)`. Without boxes there is one label, the class of the whole image, and `scores` are of all `classes`.
    """
    scale = drawing_scale(*image.shape[:2])
    large = mmcv.bgr2rgb(mmcv.imrescale(image, scale))
    if boxes is None:
        sample = DataSample().set_pred_label(torch.as_tensor(labels))
        if scores is not None:
            sample.set_pred_score(torch.as_tensor(scores))
        return mmcv.rgb2bgr(_visualizer(UniversalVisualizer).visualize_cls(large, sample, classes))
    found = dict(labels=labels, bboxes=np.asarray(boxes, np.float32).reshape(-1, 4) * scale, scores=scores)
    if masks is not None:
        found['masks'] = np.array([mmcv.imrescale(mask.astype(np.uint8), large.shape[1::-1]) > 0 for mask in masks],
                                  bool).reshape(-1, *large.shape[:2])
    visualizer = _visualizer(DetLocalVisualizer)
    visualizer.dataset_meta = dict(classes=classes)
    objects = InstanceData(**{name: value for name, value in found.items() if value is not None})
    visualizer.add_datasample('', large, DetDataSample(gt_instances=objects), draw_pred=False)
    return mmcv.rgb2bgr(visualizer.get_image())


@cache
def _visualizer(cls: type) -> Visualizer:
    return cls()


def draw_predictions(runner, image: np.ndarray, score_thr: float) -> np.ndarray:
    """The image, uint8 BGR, with the predictions of an exported model; objects with at least the score `score_thr`."""
    if not runner.is_detector:
        scores = runner.classify(image)
        return draw_objects(image, runner.classes or None, scores.argmax(keepdims=True), scores)
    found = runner.detect(image, score_thr)
    return draw_objects(image, runner.classes or None, found.labels, found.scores, found.boxes, found.masks)


def find_images(source: str, out_dir: str, limit: int | None = None) -> list[tuple[Path, Path]]:
    """The images at `source` with the paths of their drawings under `out_dir`."""
    source, out_dir = Path(source), Path(out_dir)
    root = source if source.is_dir() else source.parent
    # Not Path.resolve, which raises an error on a circular link.
    drawn = Path(os.path.realpath(out_dir))
    if drawn == Path(os.path.realpath(root)):
        raise PreflightError(f'--out-dir {out_dir} is where the images are: they would be overwritten.')
    if source.is_dir():
        paths = (path for path in source.rglob('*') if path.suffix.lower() in IMAGE_SUFFIXES)
        # An output folder inside the input folder contains drawings of an earlier run.
        images = sorted(path for path in paths if drawn not in Path(os.path.realpath(path)).parents)
    else:
        images = [source] if source.is_file() else []
    if not images:
        raise PreflightError(f'there is no image at {source} (looked for {", ".join(sorted(IMAGE_SUFFIXES))}).')
    return [(path, out_dir / path.relative_to(root)) for path in images[:limit]]


def draw_images(images: Sequence[tuple[Path, Path]],
                predict: Callable[[Path, np.ndarray], tuple[np.ndarray, dict | None]],
                out_dir: str, save_pred: bool = False, loading: dict | None = None) -> None:
    """Draws the images of :func:`find_images`, and prints which ones were skipped and why.

    `predict(path, image)` returns the drawing of an image and the predictions; images are uint8 BGR. With `save_pred`,
    the predictions are written to `out_dir/preds/NAME.json`, as by mmdet's `DetInferencer`. `loading` are arguments of
    :func:`read_image`, with which the model reads its images.
    """
    preds = {path: Path(out_dir, 'preds', out_file.relative_to(out_dir)).with_suffix('.json')
             for path, out_file in images}
    if save_pred and len(set(preds.values())) < len(preds):
        same = next(path for path in preds if [*preds.values()].count(preds[path]) > 1)
        raise PreflightError(f'{same} and another image of this name would have one file of predictions, '
                             f'{preds[same]}: rename one, or add --no-save-pred.')
    skipped = []
    for path, out_file in tqdm(images, desc='drawing', unit='image', disable=None):
        image = read_image(path, **(loading or {}))
        if image is None:
            skipped.append(f'{path}: not readable as an image')
            continue
        try:
            drawing, prediction = predict(path, image)
            content = cv2.imencode(out_file.suffix, drawing)[1]
        except cv2.error as error:
            height, width = image.shape[:2]
            skipped.append(f'{path} ({width} x {height} pixels): {error.err}')
            continue
        out_file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out_file) as part:
            part.write_bytes(content)
        if save_pred and prediction:
            preds[path].parent.mkdir(parents=True, exist_ok=True)
            write_text(preds[path], json.dumps(prediction))
    if len(skipped) == len(images):
        raise PreflightError(f'no image could be drawn: {"; ".join(skipped)}.')
    if skipped:
        print(f'skipped: {"; ".join(skipped)}')
    print(f'{out_dir} has {plural(len(images) - len(skipped), "image")}')


def drawing_scale(height: int, width: int) -> float:
    """The factor to enlarge an image before drawing: to a short side of 512, and a long side of at most 2048."""
    return max(1.0, min(512 / min(height, width), 2048 / max(height, width)))


def read_image(path: Path, **loading) -> np.ndarray | None:
    """The image as a uint8 BGR array, or None if it cannot be read; `loading` are arguments of `mmcv.imread`."""
    try:
        return mmcv.imread(str(path), **loading)
    except (cv2.error, OSError):  # an empty file, or a broken link
        return None
