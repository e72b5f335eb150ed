"""A model as a file for a compiler that quantizes by itself: what the chip computes, and what the host does around it.

The file takes one image. It ends with a classifier's logits, as probabilities would lose their small values in 8 bits.
Padding is written by the host: that of a detector depends on the image.
"""
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, fx, nn

from ...utils import PreflightError
from ..graph import Exportable, exporting
from ..rewrite.operators import Editor, center_attention, for_chips
from ..rewrite.pixels import fold_pixels

aten = torch.ops.aten
DIMENSIONS = 5  # at most, of tensors that compilers take


class ChipGraph(nn.Module):
    """Another graph up to a classifier's logits or a detector's maps, from images alone."""
    inputs = ('images', )

    def __init__(self, graph: nn.Module, task: str):
        super().__init__()
        self.whole, self.task, self.pixels = graph, task, graph.pixels
        self.outputs = ('logits', ) if task == 'classifier' else tuple(graph.outputs)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.whole.logits(images) if self.task == 'classifier' else self.whole(images)


@torch.no_grad()
def for_compiler(model: Exportable, normalizes: bool = True, centers: bool = False) -> Exportable:
    """A model as compilers take it, for one image; its `meta` has `host`, the host's part.

    If it `normalizes`, the first layer takes raw pixels. Otherwise `mean` and `std` of `host` are for the compiler or
    the host; they are None if the model does not normalize. If it `centers`, attentions subtract the mean of keys and
    values over each image. Raises a PreflightError if it cannot be such a file.
    """
    meta, task, pixels = model.meta, model.meta['task'], model.graph.pixels
    if model.dynamic:
        raise PreflightError('--dynamic is not supported by compilers of chips, whose files have a fixed shape.')
    if task == 'detector':
        raise PreflightError('compilers of chips do not take whole detectors: --parts backbone exports backbone and '
                             'neck, and the rest stays in torch.')
    if task == 'features' and pixels.enhancing is not None:
        raise PreflightError(f'--parts backbone does not support {type(pixels.enhancing).__name__}, whose output would '
                             'depend on the padding.')
    graph = ChipGraph(copy.deepcopy(model.graph), task)
    image = model.inputs[0][:1]
    host = dict(mean=None, std=None)
    if pixels is not None:
        mean, std = pixels.mean.flatten(), pixels.std.flatten()
        if pixels.flips:
            mean, std = mean.flip(0), std.flip(0)
        if task == 'features':
            host['pad'] = (mean + std * pixels.pad_value).tolist()
        if not normalizes and pixels.enhancing is None:
            host.update(mean=mean.tolist(), std=std.tolist())
            image = (image - mean[:, None, None]) / std[:, None, None]
            graph.pixels.mean.zero_()
            graph.pixels.std.fill_(1)
        if host['mean'] is None or pixels.flips:
            graph = fold_pixels(graph, image)
        else:
            graph.pixels.normalization = nn.Identity()
            graph.pixels.mean = graph.pixels.std = None
    with exporting():
        program = torch.export.export(graph, (image, ), strict=False)
    has_windows = any(isinstance(value := node.meta.get('val'), Tensor) and value.dim() > DIMENSIONS
                      or node.target is aten.im2col.default for node in program.graph.nodes)
    if has_windows or centers:
        names = graph.inputs, graph.outputs
        graph = join_padding(for_chips(program, centers)) if has_windows else center_attention(program.module())
        graph.inputs, graph.outputs = names
    meta = meta | dict(shape=[1, *meta['shape'][1:]], host=host)
    return dataclasses.replace(model, graph=graph, meta=meta, inputs=(image, ))


def join_padding(module: fx.GraphModule) -> fx.GraphModule:
    """Writes padding by a constant in a graph of `for_chips` as concatenations, in place; returns the graph.

    Rockchip's compiler cannot pad a map of 2 x 2, such as that of a Swin's windows on small images.
    """
    editor = Editor(module)
    for node in list(module.graph.nodes):
        if node.target is not aten.pad.default or node.args[2:3] not in ((), ('constant', )):
            continue
        x, padding, value = *node.args[:2], node.args[3] if len(node.args) > 3 else None
        for index, sides in enumerate(zip(padding[::2], padding[1::2], strict=True)):
            shape = x.meta['val'].shape
            dim = len(shape) - 1 - index
            before, after = ([editor.constant(node, torch.full((*shape[:dim], side, *shape[dim + 1:]), value or 0.))]
                             if side else [] for side in sides)
            if before or after:
                x = editor.emit(node, aten.cat.default, [*before, x, *after], dim)
        node.replace_all_uses_with(x)
        module.graph.erase_node(node)
    module.recompile()
    return module


def images_for(arrays: Sequence[np.ndarray], meta: dict, normalizes: bool = False) -> np.ndarray:
    """The images `(N, C, H, W)` that a file of :func:`for_compiler` takes: padded, and normalized by the host."""
    images, *sizes = arrays
    host = meta['host']
    if 'pad' in host:
        images = images.copy()
        for image, (height, width) in zip(images, sizes[0].astype(int), strict=True):
            for channel, value in zip(image, host['pad'], strict=True):
                channel[height:], channel[:, width:] = value, value
    if normalizes and host['mean'] is not None:
        mean, std = (np.float32(host[name])[:, None, None] for name in ('mean', 'std'))
        images = (images - mean) / std
    return images


def outputs_of(outs: list[np.ndarray], meta: dict) -> list[np.ndarray]:
    """The outputs of the model for those of the file: a classifier's probabilities."""
    return [torch.from_numpy(outs[0]).softmax(1).numpy()] if meta['task'] == 'classifier' else outs
