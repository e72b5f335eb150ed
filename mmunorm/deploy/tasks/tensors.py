"""Any model of torch: images to tensors."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ..graph import Pixels, named_outputs
from ..rewrite.pixels import fold_pixels
from .base import SIGNATURE, Task


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


class ChannelsLast(nn.Module):
    """A graph with channels-last input `(N, H, W, C)` float32; `compute(graph, images)` returns its outputs by name."""

    def __init__(self, graph: nn.Module, compute: Callable[[nn.Module, Tensor], dict[str, Tensor]]):
        super().__init__()
        self.whole, self.compute = graph, compute  # `graph` is an attribute of torch.fx's modules

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        return self.compute(self.whole, *(x.permute(0, 3, 1, 2) for x in inputs.values()))


def one_part(graph: nn.Module, images: Tensor, compute: Callable[[nn.Module, Tensor], dict[str, Tensor]]
             ) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
    """:meth:`Task.parts` of a graph that is one signature."""
    sample = dict(images=images.permute(0, 2, 3, 1).contiguous())
    return {SIGNATURE: (ChannelsLast(fold_pixels(graph, images), compute), sample)}


class Tensors(Task):
    name = 'tensors'

    def parts(self, graph: ModelGraph, images: Tensor) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        return one_part(graph, images, lambda whole, x: dict(zip(whole.outputs, whole(x), strict=True)))
