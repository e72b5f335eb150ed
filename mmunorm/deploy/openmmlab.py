"""Prepares an OpenMMLab model for export as one graph."""
from __future__ import annotations

import copy
from functools import partial

import torch
from mmengine.config import Config
from torch import nn

from .. import __version__
from ..checkpoints.loading import read_checkpoint
from ..config.models import load_model
from ..fusion import allow_partial_calls
from ..modules import is_any
from ..utils import PreflightError, error_text
from .comparison import tensor_differences
from .graph import Exportable
from .preprocessing import loading_of, steps_of
from .tasks import PARTS, TASKS, find_task

WINDOWED = 'mmpretrain.models.utils.attention.ShiftWindowMSA', 'mmdet.models.backbones.swin.ShiftWindowMSA'


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
    # A classifier pads in its graph, so that a file takes images as they are resized.
    divisor = 1 if task.name == 'classifier' else getattr(model.data_preprocessor, 'pad_size_divisor', 1)
    shape = [-(-side // divisor) * divisor for side in shape or _default_shape(steps)]
    names = checkpoint_meta.get('dataset_meta') or {}
    classes = names.get('classes') or names.get('CLASSES')
    return dict(
        made_by=f'mmunorm {__version__}', model=type(model).__name__, task=task.name,
        classes=[str(name) for name in classes or ()], steps=steps, loading=loading_of(pipeline),
        bgr=any(step.type.endswith('LoadImageFromFile') for step in pipeline), shape=[1, 3, *shape])


def _default_shape(steps: list[dict]) -> tuple[int, int]:
    last = steps[-1] if steps else {}
    if last.get('step') in ('crop', 'resize'):
        return tuple(last['size'])
    if last.get('step') == 'within':
        return last['size'][0], last['size'][0]
    raise PreflightError('--shape must be given: the test pipeline does not define an image size.')


def prepare_export(model: nn.Module, meta: dict, batch: int = 1, dynamic: bool = False) -> Exportable:
    """A classifier of mmpretrain or a detector of mmdet, in eval mode on the CPU, as one graph.

    `meta` is the result of :func:`describe_model`. With `dynamic` the graph takes any number of images, None in the
    `shape` of `Exportable.meta`.

    Raises a PreflightError if the model has a part that cannot be exported, does not support this image size, or has a
    `data_preprocessor` that does something else than the graph.
    """
    task = TASKS[meta['task']]
    graph = copy.deepcopy(task.graph(model)).eval().requires_grad_(False)
    allow_partial_calls(graph)
    meta = {**meta, 'shape': [batch, *meta['shape'][1:]], 'outputs': graph.outputs, **getattr(graph, 'meta', {})}
    _, channels, height, width = meta['shape']
    if dynamic:
        meta['shape'] = [None, channels, height, width]
        batch = 2  # torch.export would take a batch of 1 for fixed
        for module in graph.modules():
            if is_any(module, WINDOWED):
                module.window_reverse = partial(_reverse_windows, module.window_size)
    inputs = _sample_inputs(graph, batch, channels, height, width)
    try:
        with torch.no_grad():
            graph(*inputs)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise PreflightError(f'{meta["model"]} does not run on images of {height} x {width}: {error_text(error)}; '
                             'choose another --shape.') from error
    _check_preprocessing(model, graph, meta, inputs)
    return Exportable(graph, meta, inputs, dynamic)


def _reverse_windows(size: int, windows: torch.Tensor, height: int, width: int, *_) -> torch.Tensor:
    """`window_reverse` of the Swins of mmpretrain and mmdet, whose division would fix the number of images."""
    x = windows.view(-1, height // size, width // size, size, size, windows.shape[-1])
    return x.transpose(2, 3).reshape(-1, height, width, x.shape[-1])


def _sample_inputs(graph: nn.Module, batch: int, channels: int, height: int, width: int) -> tuple[torch.Tensor, ...]:
    """A batch of blurred noise as a graph's inputs; for a detector, the last image is padded."""
    small = torch.rand(batch, channels, max(height // 8, 2), max(width // 8, 2),
                       generator=torch.Generator().manual_seed(0)) * 255
    images = nn.functional.interpolate(small, (height, width), mode='bilinear').round()
    if 'sizes' not in graph.inputs:
        return (images, )
    sizes = torch.tensor([[height, width]] * batch).float()
    sizes[-1] = (sizes[-1] * 0.9).floor()
    return images, sizes


@torch.no_grad()
def _check_preprocessing(model: nn.Module, graph: nn.Module, meta: dict, inputs: tuple[torch.Tensor, ...]) -> None:
    """Raises a PreflightError if a graph does to pixels something else than the model's preprocessor."""
    preprocessor, (images, *sizes) = type(model.data_preprocessor).__name__, inputs
    if sizes:  # an image of the full size, to which the preprocessor pads, and one that is padded
        images, sizes = images[[0, -1]], torch.stack([torch.tensor(images.shape[2:]).float(), sizes[0][-1]])
        data = [image[:, :height, :width].byte()
                for image, (height, width) in zip(images, sizes.long().tolist(), strict=True)]
        pixels = graph.pixels(images, sizes)
    else:
        data, pixels = images.byte(), graph.pixels(images)
    try:
        expected = model.data_preprocessor(dict(inputs=data, data_samples=None), False)['inputs']
        found = tensor_differences(dict(images=pixels.numpy()), dict(images=expected.numpy()))
    except Exception as error:  # that of a project may raise any
        raise PreflightError(f'{meta["model"]} with {preprocessor}, its data_preprocessor, cannot be compared with '
                             f'what would be exported: {error_text(error)}.') from error
    if not found.is_within():
        raise PreflightError(f'{preprocessor}, the data_preprocessor of {meta["model"]}, does something that the file '
                             f'would not: {found}.')
