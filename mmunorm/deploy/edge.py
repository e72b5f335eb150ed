"""A model's layers as chips take them: no more than four dimensions, constants in place of what a size decides.

Each layer here computes what the stock one does.
"""
from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from mmpretrain.models.utils import MultiheadAttention, to_2tuple
from torch import Tensor, nn

from .windows import StaticWindowMSA, is_window_attention, replace_modules


@torch.no_grad()
def with_edge_layers(graph: nn.Module, inputs: Sequence[Tensor]) -> nn.Module:
    """A copy of a graph with the layers of this module, for inputs of one size.

    Args:
        graph (nn.Module): what :func:`mmunorm.deploy.graphs.graph_of` returns; unchanged.
        inputs (Sequence[Tensor]): a sample. It runs once, which makes the constants that its size decides.
    """
    graph = copy.deepcopy(graph)
    for is_old, new in ((is_window_attention, EdgeWindowMSA),
                        (lambda module: type(module) is MultiheadAttention, EdgeAttention),
                        (lambda module: isinstance(module, nn.Unfold), EdgeUnfold)):
        replace_modules(graph, is_old, new)
    graph.eval().requires_grad_(False)(*inputs)
    return graph


class EdgeWindowMSA(StaticWindowMSA):
    """A shifted window attention whose query, key and value have each a layer, and in INT8 a range, of their own."""

    def __init__(self, stock: nn.Module):
        super().__init__(stock)
        self.query, self.key, self.value = thirds(self.qkv)
        for parameter in self.query.parameters():
            parameter.data *= self.scale
        self.cut: Tensor | None = None

    def _cut(self, x: Tensor, rows: int, columns: int) -> Tensor:
        if not torch.compiler.is_compiling():
            self.cut = super()._cut(x, rows, columns).repeat(len(x), 1, 1)[:, None]
        return self.cut

    def _roll(self, x: Tensor, shift: int) -> Tensor:
        # ExecuTorch makes a gather of torch's own, and quantizes its indices.
        for side in (1, 2):
            x = torch.cat([x.narrow(side, -shift % x.shape[side], shift % x.shape[side]),
                           x.narrow(side, 0, -shift % x.shape[side])], side)
        return x

    def _attend(self, x: Tensor, rows: int, columns: int, cut: Tensor | None) -> Tensor:
        batch, window, channels = x.shape[0], self.window_size, x.shape[-1]
        x = x.reshape(batch * rows, window, columns, window * channels).transpose(1, 2)
        x = x.reshape(batch * rows * columns, window**2, channels)
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                   for layer in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) + self.bias
        if cut is not None:
            scores = scores + cut
        x = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x.reshape(batch * rows, columns, window, window * channels).transpose(1, 2)
        return x.reshape(batch, rows * window, columns * window, channels)


class EdgeAttention(nn.Module):
    """mmpretrain's attention over all tokens, with three layers in place of one that is cut into five dimensions.

    Args:
        stock (MultiheadAttention): its other layers are shared.
    """

    def __init__(self, stock: MultiheadAttention):
        super().__init__()
        self.query, self.key, self.value = thirds(stock.qkv)
        self.stock = stock

    def forward(self, x: Tensor) -> Tensor:
        """`(B, N, C)` to the same shape, or with other channels as the stock layer."""
        stock = self.stock
        q, k, v = (layer(x).unflatten(-1, (stock.num_heads, -1)).transpose(1, 2)
                   for layer in (self.query, self.key, self.value))
        x = stock.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = stock.gamma1(stock.proj(x))
        return v.squeeze(1) + x if stock.v_shortcut else x


class EdgeUnfold(nn.Module):
    """`nn.Unfold` as a convolution of each channel alone, with weights of zero and one: exact, and no gather.

    The attributes are those of `nn.Unfold`, which patch mergings read.
    """

    def __init__(self, stock: nn.Unfold):
        super().__init__()
        self.kernel_size, self.stride, self.padding, self.dilation = (
            to_2tuple(each) for each in (stock.kernel_size, stock.stride, stock.padding, stock.dilation))
        self.weight: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)` to `(B, C * kernel, L)`."""
        channels, (height, width) = x.shape[1], self.kernel_size
        if not torch.compiler.is_compiling():
            self.weight = torch.eye(height * width).view(-1, 1, height, width).repeat(channels, 1, 1, 1)
        x = nn.functional.conv2d(x, self.weight, None, self.stride, self.padding, self.dilation, channels)
        return x.flatten(2)


def thirds(layer: nn.Linear) -> list[nn.Linear]:
    """Three linear layers that make a third each of what a layer makes."""
    weights = layer.weight.chunk(3)
    biases = [None] * 3 if layer.bias is None else layer.bias.chunk(3)
    parts = []
    for weight, bias in zip(weights, biases, strict=True):
        part = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
        part.load_state_dict(dict(weight=weight) if bias is None else dict(weight=weight, bias=bias))
        parts.append(part)
    return parts
