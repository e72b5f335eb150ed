"""Normalization of pixels by a model's first layer, so that a file takes the bytes of an image."""
from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..graph import named_outputs


def fold_pixels(graph: nn.Module, images: Tensor) -> nn.Module:
    """A copy of a graph whose first layer takes raw pixels.

    For `y = (x - m) / s` and a convolution `W y + b` without padding, the new one has `W / s` and `b - sum(W m / s)`.
    If the model does not start with such a convolution (T2T-ViT unfolds its pixels), or also uses its pixels elsewhere,
    or if it follows an enhancer or a padding, a convolution of 1 x 1 computes the normalization. `images` is a sample.
    """
    if graph.pixels is None:
        return graph
    graph = copy.deepcopy(graph)
    pixels, channels = graph.pixels, len(graph.pixels.mean)
    normalization = nn.Conv2d(channels, channels, 1).requires_grad_(False)
    swapped = torch.eye(channels).flip(0) if pixels.flips else torch.eye(channels)
    normalization.weight.copy_((swapped / pixels.std[:, :, 0])[..., None, None])
    normalization.bias.copy_((-pixels.mean / pixels.std).flatten())
    first = None if pixels.enhancing else _first_convolution(graph, images)
    if first is not None:
        bias = torch.einsum('oihw,i->o', first.weight, normalization.bias)
        first.bias = nn.Parameter(bias if first.bias is None else first.bias + bias, requires_grad=False)
        weight = torch.einsum('oihw,ij->ojhw', first.weight, normalization.weight[..., 0, 0])
        first.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        normalization = nn.Identity()
    pixels.normalization = normalization
    pixels.mean = pixels.std = None  # else stored in the file
    return graph


@torch.no_grad()
def _first_convolution(graph: nn.Module, images: Tensor) -> nn.Conv2d | None:
    """The convolution that is the only consumer of the pixels, if it does not pad."""
    pixels, consumers = [], []

    def record_consumer(module, args):
        # timm's Conv2dSame pads, and its StdConv2d changes its weights
        if pixels and args and args[0] is pixels[0] and type(module) is nn.Conv2d:
            consumers.append(module)

    with (graph.pixels.register_forward_hook(lambda module, args, out: pixels.append(out)),
          register_module_forward_pre_hook(record_consumer)):
        expected = named_outputs(graph(images))
    is_padded = pixels[0].shape != images.shape
    if len(consumers) != 1 or consumers[0].groups > 1 or any(consumers[0].padding) or is_padded:
        return None
    # All other consumers, such as a residual connection, get zeros.
    with (graph.pixels.register_forward_hook(lambda module, args, out: torch.zeros_like(out)),
          consumers[0].register_forward_pre_hook(lambda module, args: (pixels[0], ))):
        found = named_outputs(graph(images))
    return consumers[0] if all(torch.equal(found[name], out) for name, out in expected.items()) else None
