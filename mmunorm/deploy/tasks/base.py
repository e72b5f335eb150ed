"""The base class of tasks: what the inputs and outputs of a file mean."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor, nn

from ..comparison import tensor_differences
from ..rewrite.pixels import fold_pixels

# `call(part, array)` runs a signature of a file on a channels-last float32 input and returns its outputs by name.
Call = Callable[[str, np.ndarray], dict[str, np.ndarray]]
SIGNATURE = 'classify'  # of a file that has one


class ChannelsLast(nn.Module):
    """A graph with channels-last input `(N, H, W, C)` float32; `compute(graph, images)` returns its outputs by name."""

    def __init__(self, graph: nn.Module, compute: Callable[[nn.Module, Tensor], dict[str, Tensor]]):
        super().__init__()
        self.whole, self.compute = graph, compute  # `graph` is an attribute of torch.fx's modules

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        return self.compute(self.whole, *(x.permute(0, 3, 1, 2) for x in inputs.values()))


class Task:
    """One kind of model; this class is that of any model of torch: images to tensors."""
    name = 'tensors'  # `task` in the metadata of a file

    def parts(self, graph: nn.Module, images: Tensor) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        """A graph as the signatures of a file: networks with channels-last inputs, each with a sample of these.

        The first layer normalizes the pixels. `images` is a sample `(N, 3, H, W)` float32.
        """
        sample = dict(images=images.permute(0, 2, 3, 1).contiguous())
        return {SIGNATURE: (ChannelsLast(fold_pixels(graph, images), self.compute), sample)}

    @staticmethod
    def compute(graph: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """What the only signature of a file returns."""
        return dict(zip(graph.outputs, graph(images), strict=True))

    def first(self, meta: dict, *arrays: np.ndarray) -> tuple[str, np.ndarray]:
        """The name of the first signature of a file, and its input, for the inputs of the whole model."""
        return SIGNATURE, arrays[0].transpose(0, 2, 3, 1)

    def run(self, meta: dict, call: Call, *arrays: np.ndarray) -> list[np.ndarray]:
        """The outputs of the whole model, with what a machine computes around the signatures of a file."""
        outs = call(*self.first(meta, *arrays))
        return [outs[name] for name in meta['outputs']]

    differences = staticmethod(tensor_differences)  # of the outputs of a file and torch's for the same images
