"""How a whole model of images is run to see what reads each norm: on noise, in sizes that it takes."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from ..rules import Example

_SIZES = (64, 224, 256, 384)


def on_images(model: nn.Module, call: Callable[[nn.Module, Tensor], object]) -> Example:
    """Runs a model on images of the size that it was built for, or else of the first of `_SIZES` that it takes.

    `call(model, image)` gets noise `(1, C, h, w)` of 0 to 255, in the type of the model's parameters, and returns what
    is to be compared.
    """
    sizes = dict.fromkeys([*_own_sizes(model), *((side, side) for side in _SIZES)])
    first = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    return Example(*(partial(_at, call=call, channels=channels, height=height, width=width)
                     for channels in dict.fromkeys((3, first)) for height, width in sizes))


def as_it_is(model: nn.Module, image: Tensor):
    """The call of a backbone or of a model of timm."""
    return model(image / 128 - 1)


def _at(model: nn.Module, call: Callable, channels: int, height: int, width: int) -> list:
    """One size, and others beside it that the model takes: there windows are padded, of pixels and of patches."""
    outputs = [call(model, _noise(model, channels, height, width))]
    for below, right in ((5, 3), (16, 48)):
        with suppress(Exception):
            outputs.append(call(model, _noise(model, channels, height + below, width + right)))
    return outputs


def _noise(model: nn.Module, *shape: int) -> Tensor:
    return torch.randint(256, (1, *shape), generator=torch.Generator().manual_seed(0)).to(next(model.parameters()))


def _own_sizes(model: nn.Module) -> Iterator[tuple[int, int]]:
    for module in model.modules():
        # timm and mmpretrain say img_size, transformers and torchvision image_size.
        size = getattr(module, 'img_size', getattr(module, 'image_size', None))
        if isinstance(size, int):
            yield size, size
        elif isinstance(size, (tuple, list)) and len(size) == 2:
            yield tuple(size)
