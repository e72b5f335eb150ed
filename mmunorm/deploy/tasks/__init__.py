"""Tasks: graph, metadata, comparison and host part of each kind of model."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from ...utils import PreflightError
from .base import Task
from .classifier import Classifier
from .detector import Detector
from .features import Features

__all__ = ['PARTS', 'TASKS', 'Task', 'batch_of', 'find_task']

PARTS = ('whole', 'backbone')  # what a file may have of a model
TASKS: dict[str, Task] = {task.name: task for task in (Classifier(), Detector(), Features(), Task())}


def find_task(model: nn.Module, parts: str = PARTS[0]) -> Task:
    """The task of a model of mmpretrain or mmdet. Raises a PreflightError if it is of neither."""
    from mmpretrain.models.classifiers import BaseClassifier
    if parts == 'backbone':
        return TASKS['features']
    if isinstance(model, BaseClassifier):
        return TASKS['classifier']
    if hasattr(model, 'with_bbox'):
        return TASKS['detector']
    raise PreflightError(f"{type(model).__name__} cannot be exported; supported are mmpretrain's classifiers, and "
                         'RetinaNet, FasterRCNN, MaskRCNN and CascadeRCNN of mmdet.')


def batch_of(images: Sequence[np.ndarray], meta: dict) -> tuple[np.ndarray, ...]:
    """The inputs of a file with the metadata `meta`, see :meth:`Classifier.batch`."""
    return TASKS[meta['task']].batch(images, meta)
