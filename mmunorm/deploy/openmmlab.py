"""Prepares an OpenMMLab model for export as one graph."""
from __future__ import annotations

import copy
import math

import numpy as np
import torch
from mmengine.config import Config
from torch import nn

from .. import __version__
from ..checkpoints.loading import read_checkpoint
from ..config.models import load_model
from ..fusion import allow_partial_calls
from ..utils import PreflightError, error_text
from .comparison import tensor_differences
from .graph import Exportable, outputs_by_name
from .preprocessing import loading_of, steps_of
from .rewrite.windows import DynamicWindowMSA, for_any_size, side_multiple
from .tasks import PARTS, TASKS, find_task


def loaded_model(cfg: Config, checkpoint: str, shape: tuple[int, int] | None = None,
                 parts: str = PARTS[0]) -> tuple[nn.Module, dict]:
    """The model of a config and a checkpoint, with its norms, and what :func:`describe_model` returns for it."""
    model = load_model(cfg, checkpoint)
    return model, describe_model(model, cfg, read_checkpoint(checkpoint).get('meta', {}), shape, parts)


def describe_model(model: nn.Module, cfg: Config, checkpoint_meta: dict, shape: tuple[int, int] | None = None,
                   parts: str = PARTS[0]) -> dict:
    """What a file says about its model, for :class:`ExportedModel` to use it without the config.

    `checkpoint_meta`, `meta` of the checkpoint, has the names of the classes. `shape`, height and width of the input,
    is by default what the test pipeline makes; for a detector a square that takes landscape and portrait images, and
    always rounded up to multiples of its `pad_size_divisor`. `parts` is one of `PARTS`.

    Raises a PreflightError if the test pipeline has a step that cannot be exported, or does not define a size.
    """
    if cfg.get('test_dataloader') is None:
        raise PreflightError(f'{cfg.filename} has no test_dataloader, whose pipeline defines the resizing.')
    pipeline = cfg.test_dataloader.dataset.pipeline
    try:
        steps = steps_of(pipeline)
    except ValueError as error:
        raise PreflightError(f'the test pipeline of {cfg.filename} cannot be exported: {error}.') from error
    task = find_task(model, parts)
    shape = task.shape(model, shape or _default_shape(steps))
    names = checkpoint_meta.get('dataset_meta') or {}
    classes = names.get('classes') or names.get('CLASSES')
    return dict(
        made_by=f'mmunorm {__version__}', model=type(model).__name__, task=task.name,
        classes=[str(name) for name in classes or ()], steps=steps, loading=loading_of(pipeline),
        divisor=getattr(model.data_preprocessor, 'pad_size_divisor', 1),
        bgr=any(step.type.endswith('LoadImageFromFile') for step in pipeline), shape=[1, 3, *shape],
        **task.meta(model))


def _default_shape(steps: list[dict]) -> tuple[int, int]:
    last = steps[-1] if steps else {}
    if last.get('step') in ('crop', 'resize'):
        return tuple(last['size'])
    if last.get('step') == 'within':
        return last['size'][0], last['size'][0]
    raise PreflightError('--shape must be given: the test pipeline does not define an image size.')


def prepare_export(model: nn.Module, meta: dict, batch: int = 1, dynamic: bool = False) -> Exportable:
    """A classifier of mmpretrain or a detector of mmdet, in eval mode on the CPU, as one graph.

    `meta` is the result of :func:`describe_model`. With `dynamic` the graph takes any batch size, and of a Swin without
    absolute position embeddings any height and width that are multiples of its total stride: these are None in the
    `shape` of `Exportable.meta`, whose `divisor` is the multiple.

    Raises a PreflightError if the model has a part that cannot be exported, does not support this image size, or
    returns something else after its own `data_preprocessor`.
    """
    task = TASKS[meta['task']]
    graph = copy.deepcopy(task.graph(model)).eval().requires_grad_(False)
    allow_partial_calls(graph)
    multiple = side_multiple(getattr(model, 'backbone', model)) if dynamic else None
    if multiple:
        for_any_size(graph)
    meta = {**meta, 'shape': [batch, *meta['shape'][1:]], 'outputs': graph.outputs, **getattr(graph, 'meta', {})}
    shape, open_shapes = meta['shape'], None
    if dynamic:
        # The sample must not suggest static relations, such as a batch size of 1, or equal height and width.
        shape = [2, *shape[1:]]
        meta['shape'] = [None, *shape[1:]]
        open_shapes = tuple({0: torch.export.Dim('batch')} for _ in graph.inputs)
    if multiple:
        task.check_any_size(model)
        meta['divisor'] = math.lcm(meta['divisor'], multiple)
        # Nor must a side be one window of the last map: torch.export treats 1 as static.
        least = 2 * max(module.window_size for module in graph.modules() if isinstance(module, DynamicWindowMSA))
        height, width = (max(least, -(-side // meta['divisor'])) * meta['divisor'] for side in shape[2:])
        shape = [2, 3, height, width + meta['divisor']]
        meta['shape'] = [None, 3, None, None]
        for side, name in ((2, 'rows'), (3, 'columns')):
            open_shapes[0][side] = meta['divisor'] * torch.export.Dim(name)
    inputs = _sample_inputs(graph, shape)
    try:
        expected = outputs_by_name(graph, inputs)
    except (AssertionError, RuntimeError, ValueError) as error:
        height, width = shape[2:]
        raise PreflightError(f'{meta["model"]} does not run on images of {height} x {width}: {error_text(error)}; '
                             'choose another --shape.') from error
    _check_preprocessing(model, graph, meta, inputs, expected)
    return Exportable(graph, meta, inputs, open_shapes)


def _sample_inputs(graph: nn.Module, shape: list[int]) -> tuple[torch.Tensor, ...]:
    """A batch of blurred noise as a graph's inputs; for a detector, the last image is padded."""
    batch, channels, height, width = shape
    small = torch.rand(batch, channels, max(height // 8, 2), max(width // 8, 2),
                       generator=torch.Generator().manual_seed(0)) * 255
    images = nn.functional.interpolate(small, (height, width), mode='bilinear').round()
    if 'sizes' not in graph.inputs:
        return (images, )
    sizes = torch.tensor([[height, width]] * batch).float()
    sizes[-1] = (sizes[-1] * 0.9).floor()
    return images, sizes


@torch.no_grad()
def _check_preprocessing(model: nn.Module, graph: nn.Module, meta: dict, inputs: tuple[torch.Tensor, ...],
                         expected: dict[str, np.ndarray]) -> None:
    """Raises a PreflightError if a graph, a detector's up to the neck, differs from the model with its preprocessor."""
    preprocessor = type(model.data_preprocessor).__name__
    try:
        found = tensor_differences(*TASKS[meta['task']].preprocessed(model, graph, inputs, expected))
    except Exception as error:  # that of a project may raise any
        raise PreflightError(f'{meta["model"]} with {preprocessor}, its data_preprocessor, cannot be compared with '
                             f'what would be exported: {error_text(error)}.') from error
    if not found.is_within():
        raise PreflightError(f'{preprocessor}, the data_preprocessor of {meta["model"]}, does something that the file '
                             f'would not: {found}.')
