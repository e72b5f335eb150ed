"""The normalization of pixels as part of the layer that reads them."""
from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from .graphs import ClassifierGraph, DetectorGraph, Pixels


class RawPixels(nn.Module):
    """What :class:`Pixels` does, with its normalization as a layer: `forward` is the same."""

    def __init__(self, enhancing: nn.Module | None, normalization: nn.Module):
        super().__init__()
        self.enhancing, self.normalization = enhancing, normalization

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> Tensor:
        return self.normalization(images if self.enhancing is None else self.enhancing.enhance(images, sizes))


def fold_pixels(graph: ClassifierGraph | DetectorGraph, images: Tensor) -> ClassifierGraph | DetectorGraph:
    """A copy of a graph whose first layer takes pixels as they are, so that an integer file reads a picture's bytes.

    For `y = (x - m) / s` and a convolution `W y + b` that pads nothing, the new one is `W / s` and
    `b - sum(W m / s)`. A backbone that starts with something else (T2T-ViT unfolds its pixels), or reads what an
    enhancer has made, gets a convolution of 1 x 1 for its normalization.

    Args:
        graph: a graph with `pixels`, such as :func:`mmunorm.deploy.graphs.graph_of` returns; unchanged.
        images (Tensor): a sample of its input, float32.
    """
    graph = copy.deepcopy(graph)
    enhancing, normalization = graph.pixels.enhancing, as_convolution(graph.pixels)
    first = None if enhancing else _first_convolution(graph, images)
    if first is not None:
        bias = torch.einsum('oihw,i->o', first.weight, normalization.bias)
        first.bias = nn.Parameter(bias if first.bias is None else first.bias + bias, requires_grad=False)
        weight = torch.einsum('oihw,ij->ojhw', first.weight, normalization.weight[..., 0, 0])
        first.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        normalization = nn.Identity()
    graph.pixels = RawPixels(enhancing, normalization)
    return graph


def as_convolution(pixels: Pixels) -> nn.Conv2d:
    """The normalization, and the exchange of blue and red if there is one, as a convolution of 1 x 1."""
    order = [2, 1, 0] if pixels.flips else [0, 1, 2]
    layer = nn.Conv2d(3, 3, 1).requires_grad_(False)
    layer.weight.copy_((torch.eye(3)[order] / pixels.std[:, :, 0])[..., None, None])
    layer.bias.copy_((-pixels.mean / pixels.std).flatten())
    return layer


@torch.no_grad()
def _first_convolution(graph: nn.Module, images: Tensor) -> nn.Conv2d | None:
    """The convolution that reads the pixels and nothing else does, if it pads nothing."""
    made, readers = [], []

    def look(module, args, out):
        if made and args and args[0] is made[0] and out is not made[0]:  # a padding may have nothing to do
            readers.append(module)

    handles = [graph.pixels.register_forward_hook(lambda module, args, out: made.append(out))]
    handles += [module.register_forward_hook(look) for module in graph.modules() if not list(module.children())]
    graph(images)
    for handle in handles:
        handle.remove()
    if len(readers) == 1 and isinstance(readers[0], nn.Conv2d) and readers[0].groups == 1 and not any(
            readers[0].padding):
        return readers[0]
    return None
