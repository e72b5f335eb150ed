"""Draws what an exported model sees, with OpenCV alone."""
from __future__ import annotations

import cv2
import numpy as np

from .runner import Detections


def draw_class(picture: np.ndarray, scores: np.ndarray, classes: list[str]) -> np.ndarray:
    """A copy of a picture `(h, w, 3)` with the name and the score of the best class in a line below it."""
    best = int(scores.argmax())
    picture = cv2.copyMakeBorder(picture, 0, 24, 0, 0, cv2.BORDER_CONSTANT)
    _write(picture, f'{_name(classes, best)} {scores[best]:.2f}', 4, picture.shape[0] - 7, (255, 255, 255))
    return picture


def draw_detections(picture: np.ndarray, found: Detections, classes: list[str]) -> np.ndarray:
    """A copy of a picture `(h, w, 3)` with boxes, names, scores and masks, the best on top."""
    picture = picture.copy()
    for index in reversed(range(len(found.scores))):
        label = int(found.labels[index])
        # Neighbours in the list of classes get hues that are far from each other.
        hue = np.uint8([[[label * 111 % 180, 200, 255]]])
        colour = cv2.cvtColor(hue, cv2.COLOR_HSV2BGR)[0, 0]
        if found.masks is not None:
            inside = found.masks[index]
            picture[inside] = picture[inside] // 2 + colour // 2
        x1, y1, x2, y2 = found.boxes[index].round().astype(int).tolist()
        cv2.rectangle(picture, (x1, y1), (x2, y2), colour.tolist(), 1)
        _write(picture, f'{_name(classes, label)} {found.scores[index]:.2f}', x1 + 2, y1 + 12, colour.tolist())
    return picture


def _name(classes: list[str], label: int) -> str:
    return classes[label] if label < len(classes) else str(label)


def _write(picture: np.ndarray, text: str, x: int, y: int, colour) -> None:
    cv2.putText(picture, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.4, (0, 0, 0), 3, cv2.LINE_AA)
    cv2.putText(picture, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.4, colour, 1, cv2.LINE_AA)
