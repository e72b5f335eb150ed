"""Any vision model of torch as one file, and that file beside the model; without OpenMMLab."""
from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from ..modules import eval_mode
from ..utils import PreflightError, check_module, error_text, warn, written_file
from .comparison import Comparison, tensor_differences
from .formats import format_of
from .formats.base import stage
from .forms import folded_copy
from .graph import Exportable, ModelGraph, Pixels, named_outputs
from .runtime import ExportedModel
from .saving import ExportReport, export_file

MOST = 512  # calibration images that are read
OUTSIDE = 0.05  # of the example's values outside of those of the calibration images is doubtful
SPREAD = 4  # times the example's standard deviation, too


def export(model: nn.Module, example: Tensor, path: str | Path, int8: str | None = None,
           calibration: Tensor | Iterable[Tensor] | None = None, mean: Sequence[float] | None = None,
           std: Sequence[float] | None = None, fold: bool = True, **options) -> ExportReport:
    """Writes a model of timm, torchvision, transformers or any other as a file for a runtime, and compares the two.

    The norms of a copy are folded, see :func:`mmunorm.fuse_norms`; the model stays as it is. For INT8, its residual
    streams and heads are rotated, and with calibration images keys and values lose their mean: not one operator more.

    Args:
        model (nn.Module): takes images `(N, C, H, W)`, and returns a tensor, or a tuple or dict of tensors, whose first
            dimension is N.
        example (Tensor): a batch as the model takes it. The file takes as many images of the same size at once.
        path: its ending is the format: `.onnx`, `.xml` (OpenVINO), `.tflite` (LiteRT), `.vela.tflite` (Arm Ethos-U),
            `.pte` (ExecuTorch), `.rknn` (Rockchip), `.qnn.onnx` (Qualcomm) or `.bmodel` (Sophgo).
        int8 (str, optional): a kind of INT8: 'static' of ONNX, OpenVINO, ExecuTorch and the chips; 'external' of ONNX,
            a file in floating point for compilers that quantize by themselves; 'dynamic', 'products' or 'full' of
            LiteRT. Defaults to floating point, with Ethos-U to 'full', with the chips to float16.
        calibration: images that the ranges of INT8 are taken from, a batch or an iterable of batches, as the model
            takes them; of more than 512, evenly spaced ones of a batch, or the first ones of an iterable. Not needed
            for 'dynamic'. Some of them and the example are compared with torch in the report, which has a warning if
            they do not look like the example.
        mean, std (Sequence[float], optional): what the model's images are normalized with, for pixels from 0 to 1 as in
            timm's `pretrained_cfg` and transformers' `image_mean`. The file then takes pixels from 0 to 255.
        fold (bool): fold the norms; False is for a file to compare with. A model that is folded already is taken as it
            is, with a warning if it was folded without the rotation that INT8 needs. Defaults to True.
        **options: those of the format: `accelerator` of Ethos-U; of a chip's compiler, its own by name, such as
            `target_platform='rk3576'` (Rockchip), `processor='bm1684x'` (Sophgo) or `activation_type='QUInt16'` (QNN).

    Raises:
        TypeError: `model` is no module.
        PreflightError: the arguments do not fit, a package is missing, the model cannot be exported, or a file in
            floating point has an SNR below 60 dB.
        OSError: the file cannot be written. After any error, the files of an earlier export are unchanged.
    """
    chosen, path = format_of(path), Path(path)
    int8 = chosen.check(int8)
    chosen.check_options(options)
    if calibration is not None and int8 is None:
        raise PreflightError(f'calibration is for INT8, and int8 is not given: one of {", ".join(chosen.int8_kinds)}.')
    if calibration is None and chosen.needs_images(int8):
        raise PreflightError(f'int8={int8!r} takes its ranges from images: give them as calibration.')
    if not path.parent.is_dir():
        raise PreflightError(f'path: there is no folder {path.parent}.')
    written_file(path)
    exportable = as_exportable(model, example, mean, std)
    images, lines = None, []
    if calibration is not None:
        images = _images_of(calibration, 'calibration', example.shape, MOST)
        if doubt := unlike(example.detach().cpu().float(), images):
            warn(doubt)
            lines.append(f'warning: {doubt}')
    if fold:
        stage('folding the norms')
        lines += folded_copy(exportable.graph.model, int8, example.detach().cpu().float(), images)
    batches = () if images is None else images.split(len(example))
    samples = [(_pixels_of(batch.numpy(), exportable.meta), ) for batch in batches if len(batch) == len(example)]
    report = export_file(exportable, chosen, path, int8=int8, samples=samples, **options)
    return replace(report, lines=[*lines, *report.lines])


def unlike(example: Tensor, images: Tensor) -> str:
    """What makes calibration images doubtful for a model that takes images such as `example`; '' if nothing does."""
    low, high = images.min().item(), images.max().item()
    outside = ((example < low) | (example > high)).double().mean().item()
    where = f'the calibration images, which are from {low:.3g} to {high:.3g} where the example is from ' \
            f'{example.min().item():.3g} to {example.max().item():.3g}: normalize both as the model needs it'
    if outside > OUTSIDE:
        return f'{100 * outside:.0f} % of the values of the example are outside of those of {where}.'
    if len(images) > 1 and example.std() and images.std() > SPREAD * example.std():
        return f'the values of the example differ {images.std() / example.std():.0f} times less than those of {where}.'
    return ''


@torch.inference_mode(False)  # its tensors have no version
@torch.no_grad()
def as_exportable(model: nn.Module, example: Tensor, mean: Sequence[float] | None = None,
                  std: Sequence[float] | None = None) -> Exportable:
    """The graph of a model; arguments and errors are those of :func:`export`."""
    check_module(model)
    if not isinstance(example, Tensor) or example.dim() != 4 or not len(example):
        got = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise PreflightError(f'example must be a batch of images (N, C, H, W), got {got}.')
    if (mean is None) != (std is None):
        raise PreflightError('mean and std go together: one of them is missing.')
    example = example.detach().cpu().float().contiguous()
    pixels = None
    if mean is not None:
        mean, std = _per_channel('mean', mean, example.shape[1]), _per_channel('std', std, example.shape[1])
        rows = {name: 255 * torch.tensor(values).view(-1, 1, 1) for name, values in (('mean', mean), ('std', std))}
        pixels = Pixels(SimpleNamespace(_enable_normalize=True, **rows))
    name = type(model).__name__
    model = copy.deepcopy(model).cpu().float().to(memory_format=torch.contiguous_format).eval().requires_grad_(False)
    inverted = example.max() + example.min() - example  # other values, and none that a model may refuse
    written = example.clone()
    outputs = _outputs_of(model, written)
    if written._version:  # the model writes to its input
        model.register_forward_pre_hook(lambda module, args: (args[0].clone(), ))
    again, others = _outputs_of(model, example), _outputs_of(model, inverted)
    if not outputs:
        raise PreflightError(f'{name} returns nothing: export takes a tensor, or a tuple or dict of tensors.')
    for key, out in outputs.items():
        other = others.get(key)
        if other is None or other.shape != out.shape:
            raise PreflightError(f'the shape of {key} of {name} depends on its input: {tuple(out.shape)} for one, '
                                 f'{other if other is None else tuple(other.shape)} for another.')
        if (again[key].double() - out.double()).norm() > 1e-3 * out.double().norm():
            raise PreflightError(f'{key} of {name} differs between two runs on the same images: it is random, or '
                                 'depends on earlier runs.')
        if out.isnan().any():
            raise PreflightError(f'{key} of {name} has NaN for the example.')
        if out.shape[:1] != example.shape[:1]:
            raise PreflightError(f'{key} of {name} must have the {len(example)} images as first dimension, got '
                                 f'{tuple(out.shape)}.')
    graph = ModelGraph(model, list(outputs), pixels).eval()
    meta = dict(made_by='mmunorm', model=name, task='tensors', classes=[], shape=list(example.shape),
                outputs=list(outputs), mean=mean, std=std)
    images = torch.from_numpy(_pixels_of(example.numpy(), meta))
    return Exportable(graph, meta, (images, ))


@torch.no_grad()
def compare(path: str | Path, model: nn.Module, images: Tensor | Iterable[Tensor]) -> Comparison:
    """Runs an exported file and its model on the same images.

    Args:
        path: a file of :func:`export`.
        model (nn.Module): the model; it runs in eval mode.
        images: a batch, or an iterable of batches, as the model takes them.

    Raises:
        TypeError: `model` is no module.
        PreflightError: the file cannot be opened, or does not fit the model or the images.
    """
    file = ExportedModel(path)
    check_module(model)
    if file.meta['task'] != 'tensors':
        raise PreflightError(f'{path} is not of mmunorm.export: use tools/deploy/test.py.')
    images = _images_of(images, 'images', file.meta['shape'])
    parts: dict[str, list[Tensor]] = {}
    like = next(model.parameters(), images)
    with eval_mode(model):
        for batch in images.split(file.meta['shape'][0]):
            batch = batch.to(like.device, like.dtype, copy=True)  # the model may write to it
            for name, out in _outputs_of(model, batch).items():
                parts.setdefault(name, []).append(out.cpu())
    if list(parts) != file.meta['outputs']:
        raise PreflightError(f'{path} returns {", ".join(file.meta["outputs"])}, and the model {", ".join(parts)}.')
    got = file(_pixels_of(images.numpy(), file.meta))
    expected = {name: torch.cat(outs).double().numpy() for name, outs in parts.items()}
    for name, exact in expected.items():
        if got[name].shape != exact.shape:
            raise PreflightError(f'{path} is of another model: {name} is {got[name].shape}, and of '
                                 f'{type(model).__name__} {exact.shape}.')
    return tensor_differences(got, expected)


def _per_channel(name: str, values: Sequence[float], channels: int) -> list[float]:
    """A checked `mean` or `std`, as plain numbers."""
    values = np.asarray(values)
    if values.shape != (channels, ) or values.dtype.kind not in 'iuf' or not (
            (values >= 0) & (values <= 1)).all() or name == 'std' and not values.all():
        limits = 'above 0 and at most 1' if name == 'std' else 'from 0 to 1'
        raise PreflightError(f'{name} must have {channels} numbers {limits}, one a channel, got {values.tolist()}.')
    return values.tolist()


def _outputs_of(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The outputs by name; any error is a PreflightError."""
    try:
        out = model(images)
    except Exception as error:  # a model's code may raise any
        raise PreflightError(f'{type(model).__name__} does not take images of {tuple(images.shape)}: '
                             f'{error_text(error)}') from error
    return named_outputs(out)


def _images_of(images: Tensor | Iterable, name: str, shape: Sequence[int], most: int | None = None) -> Tensor:
    """One tensor of all images, or of at most so many."""
    if isinstance(images, Tensor):
        images = [images if most is None or len(images) <= most
                  else images[torch.linspace(0, len(images) - 1, most).long()]]
    batches, number = [], 0
    for batch in images if isinstance(images, Iterable) else [images]:
        batch = batch[0] if isinstance(batch, (tuple, list)) else batch
        if not isinstance(batch, Tensor) or batch.dim() != 4 or list(batch.shape[1:]) != list(shape[1:]):
            got = tuple(batch.shape) if isinstance(batch, Tensor) else type(batch).__name__
            raise PreflightError(f'{name} must be batches of (N, {", ".join(map(str, shape[1:]))}), got {got}.')
        if not batch.is_floating_point() or not batch.isfinite().all():
            got = 'NaN or infinity' if batch.is_floating_point() else batch.dtype
            raise PreflightError(f'{name} must be images as the model takes them, finite and floating-point, got '
                                 f'{got}.')
        batches.append(batch.detach().cpu().float())
        number += len(batch)
        if most is not None and number >= most:
            break
    if number < shape[0]:
        raise PreflightError(f'{name} must be at least {shape[0]} images, as many as a batch of the file, got '
                             f'{number}.')
    return torch.cat(batches)[:most]


def _pixels_of(images: np.ndarray, meta: dict) -> np.ndarray:
    """What the file takes for images as the model takes them."""
    if meta['mean'] is None:
        return images
    mean, std = (np.float32(meta[name])[:, None, None] for name in ('mean', 'std'))
    return 255 * (images * std + mean)
