"""Finds, reads and draws images for the command-line tools."""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import mmcv
import numpy as np
from tqdm import tqdm

from ..engine.images import image_problem
from ..utils import IMAGE_SUFFIXES, PreflightError, plural, whole_file, write_text

LETTERS = 0.7  # the size of labels in an image with a short side of 512 pixels


@dataclass(frozen=True)
class Object:
    """A label of an image: a detected object, or the class of the whole image."""
    label: int
    text: str
    box: Sequence[float] | None = None  # x1 y1 x2 y2 in the image's pixels; None for the class of the whole image
    mask: np.ndarray | None = None  # `(height, width)` bool


def label_objects(classes: Sequence[str], labels, scores, boxes=None, masks=None) -> list[Object]:
    """Objects with the name and the score of their class as text; without boxes, classes of the whole image."""
    missing = [None] * len(labels)
    return [Object(int(label), f'{classes[label] if label < len(classes) else label} {score:.2f}', box, mask)
            for label, score, box, mask in zip(labels, scores, missing if boxes is None else boxes,
                                               missing if masks is None else masks, strict=True)]


def objects_in(runner, image: np.ndarray, score_thr: float) -> list[Object]:
    """The predictions of an exported model for an image, uint8 BGR; objects with at least the score `score_thr`."""
    if not runner.is_detector:
        scores = runner.classify(image)
        return label_objects(runner.classes, [scores.argmax()], [scores.max()])
    result = runner.detect(image, score_thr)
    return label_objects(runner.classes, result.labels, result.scores, result.boxes, result.masks)


def draw_objects(image: np.ndarray, objects: Sequence[Object]) -> np.ndarray:
    """The image with its objects drawn, enlarged so that labels are readable; the first object is on top."""
    scale = drawing_scale(*image.shape[:2])
    large = mmcv.imrescale(image, scale)
    if any(item.box is None for item in objects):  # the class is written below the image
        large = cv2.copyMakeBorder(large, 0, 32, 0, 0, cv2.BORDER_CONSTANT)
    for item in reversed(objects):
        if item.box is None:
            _write(large, item.text, 4, large.shape[0] - 9, (255, 255, 255))
            continue
        # Neighbours in the list of classes get hues that are far from each other.
        colour = cv2.cvtColor(np.uint8([[[item.label * 111 % 180, 200, 255]]]), cv2.COLOR_HSV2BGR)[0, 0]
        if item.mask is not None:
            inside = cv2.resize(item.mask.astype('uint8'), large.shape[1::-1]) > 0
            large[inside] = large[inside] // 2 + colour // 2
        x1, y1, x2, y2 = (np.asarray(item.box) * scale).round().astype(int).tolist()
        cv2.rectangle(large, (x1, y1), (x2, y2), colour.tolist(), 2)
        _write(large, item.text, x1 + 3, y1 + 20, colour.tolist())
    return large


def _write(image: np.ndarray, text: str, x: int, y: int, colour: Sequence[int]) -> None:
    for outline, thickness in (((0, 0, 0), 5), (colour, 2)):
        cv2.putText(image, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, LETTERS, outline, thickness, cv2.LINE_AA)


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
            skipped.append(f'{path} ({width} x {height} pixels): {image_problem(error)}')
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
