"""A model as one graph, the input of all formats: from the pixels of a batch of images to plain arrays."""
from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..fusion import FoldedLayerNorm, FoldedRMSNorm
from ..norms.layers import norm_layers
from ..utils import PreflightError, error_text


class Pixels(nn.Module):
    """Normalizes and pads images like the `data_preprocessor` of a model of mmpretrain or mmdet.

    Its method `enhance(images, sizes)`, as in projects/low_light, is called first.
    """

    def __init__(self, preprocessor: nn.Module):
        super().__init__()
        self.enhancing = preprocessor if hasattr(preprocessor, 'enhance') else None
        # The names in mmpretrain and mmengine differ.
        self.flips = bool(getattr(preprocessor, 'to_rgb', getattr(preprocessor, '_channel_conversion', False)))
        normalizes = preprocessor._enable_normalize
        self.register_buffer('mean', preprocessor.mean.float() if normalizes else torch.zeros(3, 1, 1))
        self.register_buffer('std', preprocessor.std.float() if normalizes else torch.ones(3, 1, 1))
        self.divisor = getattr(preprocessor, 'pad_size_divisor', 1)
        self.pad_value = float(getattr(preprocessor, 'pad_value', 0))  # of normalized pixels
        self.normalization: nn.Module | None = None  # replaces the arithmetic, see :func:`.rewrite.pixels.fold_pixels`

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> Tensor:
        """`(N, 3, H, W)` float32, 0 to 255, to multiples of `pad_size_divisor`.

        With `sizes` `(N, 2)` of images of such multiples, `pad_value` is beside each image, as mmdet pads.
        """
        if self.enhancing is not None:
            images = self.enhancing.enhance(images, sizes)
        if self.normalization is not None:
            images = self.normalization(images)
        else:
            images = ((images.flip(1) if self.flips else images) - self.mean) / self.std
        if sizes is not None:
            rows = torch.arange(images.shape[2], device=images.device)[:, None] < sizes[:, 0, None, None]
            columns = torch.arange(images.shape[3], device=images.device) < sizes[:, 1, None, None]
            return torch.where((rows & columns)[:, None], images, self.pad_value)
        below, right = (-side % self.divisor for side in images.shape[2:])
        return F.pad(images, (0, right, 0, below), value=self.pad_value) if below or right else images


class ModelGraph(nn.Module):
    """Any model of one input tensor, from `images` to its output tensors by name."""
    inputs = ('images', )

    def __init__(self, model: nn.Module, outputs: Sequence[str], pixels: Pixels | None = None):
        super().__init__()
        self.model, self.outputs, self.pixels = model, tuple(outputs), pixels

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Takes the model's input `(N, C, H, W)`, or with `pixels` values from 0 to 255."""
        if self.pixels is not None:
            images = self.pixels(images)
        return tuple(named_outputs(self.model(images)).values())


@dataclass(frozen=True, eq=False)
class Exportable:
    """A model as one graph, to be written by a format."""
    graph: nn.Module  # has the names `inputs` and `outputs`
    meta: dict  # metadata of the file
    inputs: tuple[Tensor, ...]  # a sample: the example of :func:`mmunorm.export`, or blurred noise
    dynamic: bool = False  # takes any number of images

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The result of `torch.export`. Raises a PreflightError if torch cannot export the graph."""
        with exporting():
            shapes = tuple({0: torch.export.Dim('batch')} for _ in self.inputs) if self.dynamic else None
            return torch.export.export(self.graph, self.inputs, dynamic_shapes=shapes, strict=False)


def norms_left(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the norms in a model, and of the LayerNorms and RMSNorms that folding has left without weights."""
    return [name for name, _ in norm_layers(model)], [
        name for name, module in model.named_modules() if isinstance(module, (FoldedLayerNorm, FoldedRMSNorm))]


def named_outputs(out, name: str = '') -> dict[str, Tensor]:
    """The output tensors of a model by name. Raises a PreflightError if one is no tensor, or two have one name."""
    if isinstance(out, Tensor):
        return {name or 'output': out}
    if out is None:
        return {}
    if not isinstance(out, (Mapping, tuple, list)):
        raise PreflightError(f'the model returns {name or "a value"} of type {type(out).__name__}; it must return a '
                             'tensor, or a tuple or dict of tensors.')
    found, prefix = {}, f'{name}_' if name else '' if isinstance(out, Mapping) else 'output'
    for key, value in out.items() if isinstance(out, Mapping) else enumerate(out):
        inner = named_outputs(value, f'{prefix}{key}')
        if same := found.keys() & inner.keys():
            raise PreflightError(f'the model returns two tensors that a file would name {sorted(same)[0]}: rename a '
                                 'key of its dicts.')
        found |= inner
    return found


@contextmanager
def exporting() -> Iterator[None]:
    """A context that turns errors of torch's exporters into a PreflightError."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # torch warns about its own functions
        try:
            yield
        except (RuntimeError, ValueError) as error:
            cause = error.__cause__ or error
            reason = (str(cause).strip() or error_text(cause)).splitlines()[0]
            raise PreflightError(f'torch cannot export this model: {reason}') from error
