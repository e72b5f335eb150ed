"""From a model to one file that a runtime loads without torch and without this package."""
from __future__ import annotations

import json
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mmengine.config import Config
from torch import nn

from .. import __version__
from ..errors import PreflightError, describe
from ..files import whole_file
from ..norms.layers import norm_layers
from .formats import Format
from .graphs import DetectorGraph, graph_of
from .pictures import resize, steps_of
from .runner import KEY, Runner
from .windows import with_static_windows


@dataclass(frozen=True)
class Exported:
    """What :func:`save` has made.

    Attributes:
        path: the file.
        size: bytes on the disk.
        norms: number of norms left in the model.
        difference: the largest absolute difference to torch by kind of output, for one picture of noise.
    """
    path: Path
    size: int
    norms: int
    difference: dict[str, float]


def describe_model(model: nn.Module, cfg: Config, checkpoint_meta: dict,
                   shape: tuple[int, int] | None = None) -> dict:
    """What a file says about its model, for :class:`Runner` to use it without the config.

    Args:
        model (nn.Module): classifier or detector.
        cfg (Config): its config.
        checkpoint_meta (dict): `meta` of its checkpoint, for the names of the classes.
        shape (tuple[int, int], optional): height and width of the input. By default what the test pipeline makes;
            for a detector, a square that takes pictures that lie and pictures that stand.

    Raises:
        PreflightError: the test pipeline has a step that a runtime cannot follow, or no size can be told from it.
    """
    if cfg.get('test_dataloader') is None:
        raise PreflightError(f'{cfg.filename} has no test_dataloader: its pipeline says how pictures are resized.')
    pipeline = cfg.test_dataloader.dataset.pipeline
    try:
        steps = steps_of(pipeline)
    except ValueError as error:
        raise PreflightError(f'the test pipeline of {cfg.filename} cannot be exported: {error}.') from error
    is_detector = hasattr(model, 'roi_head')
    divisor = getattr(model.data_preprocessor, 'pad_size_divisor', 1)
    names = checkpoint_meta.get('dataset_meta') or {}
    classes = names.get('classes') or names.get('CLASSES')
    meta = dict(
        made_by=f'mmunorm {__version__}', model=type(model).__name__, task='detector' if is_detector else 'classifier',
        classes=[str(name) for name in classes or ()], steps=steps, divisor=divisor,
        bgr=any(step.type.endswith('LoadImageFromFile') for step in pipeline),
        shape=[1, 3, *(shape or _default_shape(steps, divisor))])
    if is_detector and model.roi_head.with_mask:
        meta['mask_threshold'] = model.roi_head.test_cfg.mask_thr_binary
    return meta


def _default_shape(steps: list[dict], divisor: int) -> tuple[int, int]:
    last = steps[-1] if steps else {}
    if last.get('step') in ('crop', 'resize'):
        return tuple(last['size'])
    if last.get('step') == 'within':
        side = -(-last['size'][0] // divisor) * divisor
        return side, side
    raise PreflightError('--shape must be given: the test pipeline leaves pictures of any size.')


@dataclass(frozen=True)
class Traced:
    """A model as one graph, which can be saved in several formats.

    Attributes:
        program: in the form of ONNX.
        meta: what the file will say about itself.
        inputs: a sample, by :func:`sample_inputs`.
        expected: what torch makes of it, by name of output.
        norms: number of norms in the model.
    """
    program: torch.onnx.ONNXProgram
    meta: dict
    inputs: tuple[torch.Tensor, ...]
    expected: dict[str, np.ndarray]
    norms: int


def trace(model: nn.Module, meta: dict, batch: int = 1) -> Traced:
    """Turns a model into one graph.

    The model is taken as it is: fold it first with :func:`mmunorm.fuse_norms`, or leave its norms in to compare.

    Args:
        model (nn.Module): a classifier of mmpretrain or a Faster or Mask R-CNN of mmdet, in eval mode, on the CPU.
        meta (dict): what :func:`describe_model` gives.
        batch (int): pictures at once. Defaults to 1.

    Raises:
        PreflightError: the model has a part that cannot be exported, or refuses pictures of this size.
    """
    graph = with_static_windows(graph_of(model)).eval().requires_grad_(False)
    meta = {**meta, 'shape': [batch, *meta['shape'][1:]], 'outputs': graph.outputs}
    inputs = sample_inputs(graph, meta['shape'])
    try:
        with torch.no_grad():
            expected = graph(*inputs)
    except (AssertionError, RuntimeError, ValueError) as error:
        height, width = meta['shape'][2:]
        raise PreflightError(f'{meta["model"]} does not take pictures of {height} x {width}: {describe(error)}; name '
                             'another --shape.') from error
    expected = expected if isinstance(expected, tuple) else (expected, )
    expected = {name: out.numpy() for name, out in zip(graph.outputs, expected, strict=True)}
    return Traced(onnx_program(graph, inputs), meta, inputs, expected, len(list(norm_layers(model))))


def save(traced: Traced, chosen: Format, path: str | Path, half: bool = False) -> Exported:
    """Writes a graph as a file for a runtime, runs it there and compares it with torch.

    Args:
        traced (Traced): what :func:`trace` gives.
        chosen (Format): what :func:`find_format` gives.
        path: of the file, with the suffix of the format.
        half (bool): weights in float16. Defaults to False.

    Returns:
        Exported: a report.
    """
    path = Path(path)
    text = json.dumps(traced.meta)
    if chosen.name == 'onnx':
        traced.program.model.metadata_props[KEY] = text
        with whole_file(path) as part:
            traced.program.save(part, external_data=False)
    else:
        _save_openvino(traced.program, path, text, half)
    got = Runner(path)(*(each.numpy() for each in traced.inputs))
    size = sum(file.stat().st_size for file in {path, path.with_suffix('.bin')} if file.exists())
    return Exported(path, size, traced.norms, differences(got, traced.expected))


def onnx_program(graph: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.onnx.ONNXProgram:
    """A graph in the form of ONNX, in memory.

    Raises:
        PreflightError: torch cannot export it.
    """
    tables = {}
    if isinstance(graph, DetectorGraph):
        from .rcnn.nms import onnx_translations
        tables = onnx_translations()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of torch about its own functions
        try:
            return torch.onnx.export(graph, inputs, dynamo=True, verbose=False, input_names=list(graph.inputs),
                                     output_names=list(graph.outputs), custom_translation_table=tables)
        except torch.onnx.errors.OnnxExporterError as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise PreflightError(f'torch cannot export this model to ONNX: {reason}') from error


def _save_openvino(program: torch.onnx.ONNXProgram, path: Path, text: str, half: bool) -> None:
    import openvino
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source = Path(folder, 'model.onnx')
        program.save(source, external_data=False)
        model = openvino.convert_model(source)
        model.set_rt_info(text, [KEY])
        openvino.save_model(model, Path(folder, path.name), compress_to_fp16=half)
        # First the weights: without them, the other file is of no use.
        for suffix in ('.bin', '.xml'):
            Path(folder, path.name).with_suffix(suffix).replace(path.with_suffix(suffix))


def sample_inputs(graph: nn.Module, shape: list[int]) -> tuple[torch.Tensor, ...]:
    """A batch of blurred noise as a graph's inputs; for a detector, the last picture leaves room for padding."""
    batch, channels, height, width = shape
    generator = np.random.default_rng(0)
    blurred = [resize(generator.integers(0, 256, (max(height // 8, 2), max(width // 8, 2), channels), np.uint8),
                      width, height) for _ in range(batch)]
    images = torch.from_numpy(np.stack(blurred)).permute(0, 3, 1, 2).float().contiguous()
    if 'sizes' not in graph.inputs:
        return (images, )
    sizes = torch.tensor([[height, width]] * batch).float()
    sizes[-1] = (sizes[-1] * 0.9).floor()
    return images, sizes


def differences(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest absolute difference by kind of output: `scores`; of a detector also `boxes` and `masks`.

    A detection is compared with the nearest one of its class, because those of equal score have no order. Where
    there is none, the difference is infinite.
    """
    if 'dets' not in expected:
        return dict(scores=float(np.abs(got['scores'] - expected['scores']).max()))
    largest = dict.fromkeys(('scores', 'boxes', *(['masks'] if 'masks' in expected else [])), 0.)

    def note(kind, value):
        largest[kind] = max(largest[kind], float(value))

    for image, dets in enumerate(expected['dets']):
        for index in np.flatnonzero(dets[:, 4] > 0):
            same = (got['labels'][image] == expected['labels'][image, index]) & (got['dets'][image, :, 4] > 0)
            if not same.any():
                return dict.fromkeys(largest, float('inf'))
            distance = np.abs(got['dets'][image] - dets[index])
            nearest = np.where(same, distance.max(1), np.inf).argmin()
            note('boxes', distance[nearest, :4].max())
            note('scores', distance[nearest, 4])
            if 'masks' in largest:
                note('masks', np.abs(got['masks'][image, nearest] - expected['masks'][image, index]).max())
    return largest
