"""A model's layers as chips take them: no more than four dimensions, constants in place of what a size decides.

Each layer here computes what the stock one does. The normalization of pixels becomes part of the layer that reads them.
"""
from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from mmpretrain.models.utils import MultiheadAttention, to_2tuple
from torch import Tensor, nn

from ..backbones.performer import PerformerAttention, PerformerLayer
from ..backbones.t2t_vit import T2TModule
from .graphs import ClassifierGraph, DetectorGraph, Pixels
from .windows import StaticWindowMSA, is_window_attention, replace_modules


@torch.no_grad()
def with_edge_layers(graph: nn.Module, inputs: Sequence[Tensor]) -> nn.Module:
    """A copy of a graph of :mod:`.graphs` with the layers of this module, for inputs of one size.

    The sample `inputs` run once, which makes the constants that their size decides.
    """
    graph = copy.deepcopy(graph)
    for is_old, new in ((is_window_attention, EdgeWindowMSA),
                        (lambda module: type(module) is MultiheadAttention, EdgeAttention),
                        (is_folded_t2t, EdgeT2T),
                        (lambda module: type(module) is PerformerAttention, EdgePerformer),
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
    """mmpretrain's attention over all tokens, with three layers in place of one that is cut into five dimensions."""

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


class EdgePerformer(nn.Module):
    """The Performer in numbers that 8 bits can hold: `phi(q)` divided by `exp(-|q|^2 / 2)`, then by its sum.

    With that, `phi(q)` is a softmax over `w q`, and the random directions are part of the layer that makes the queries.
    The `eps` of the quotient becomes one feature more, of `N` keys without a value. Where queries are long it has
    all the weight, and the attention is nothing, as that of the stock layer.
    """

    def __init__(self, stock: PerformerAttention, eps: float = 1e-8):
        super().__init__()
        self.key, self.query, self.value = thirds(stock.kqv)
        self.queries, self.keys = followed_by(self.query, stock.w), followed_by(self.key, stock.w)
        self.proj = stock.proj
        self.rest = math.log(eps * len(stock.w))
        self.register_buffer('least', torch.tensor(1e-30), False)  # an integer file's is its step

    def forward(self, x: Tensor) -> Tensor:
        """`(B, N, input_dims)` to `(B, N, embed_dims)`."""
        v = self.value(x)
        tokens = v.shape[1]
        rest = half_square(self.query(x)) + (self.rest - math.log(tokens))
        q_features = torch.cat([self.queries(x), rest], -1).softmax(-1)
        k_features = torch.exp(self.keys(x) - half_square(self.key(x)))
        weighted = q_features @ nn.functional.pad(k_features.transpose(1, 2) @ v, (0, 0, 0, 1))
        total = q_features @ nn.functional.pad(k_features.sum(1), (0, 1), value=tokens).unsqueeze(-1)
        return v + self.proj(weighted / torch.maximum(total, self.least))


def is_folded_t2t(module: nn.Module) -> bool:
    """Whether the soft splits of a tokens-to-token module are read by linear layers alone."""
    return type(module) is T2TModule and all(
        isinstance(layer, PerformerLayer) and isinstance(layer.ln1, nn.Identity)
        for layer in (module.attention1, module.attention2))


class EdgeT2T(nn.Module):
    """A tokens-to-token module without norms: a soft split and a linear layer behind it are one convolution."""

    def __init__(self, stock: T2TModule):
        super().__init__()
        self.packing = Packing(stock.soft_split0)
        self.steps = nn.ModuleList()
        for layer, split in ((stock.attention1, stock.soft_split0), (stock.attention2, stock.soft_split1)):
            layer.attn = EdgePerformer(layer.attn)
            for name, linear in list(layer.attn.named_children()):
                if name != 'proj':
                    setattr(layer.attn, name, SoftSplit(linear, split))
            self.steps.append(layer)
        self.project = SoftSplit(stock.project, stock.soft_split2)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """`(N, in_channels, H, W)` to tokens `(N, L, embed_dims)`, and their map size `(h, w)`."""
        x = self.packing(x)
        for step in self.steps:
            # flatten(2) and transpose(1, 2) in place of these make LiteRT's converter confuse the two dimensions.
            x = step(x).unflatten(1, step.attn.value.size_of(x)).permute(0, 3, 1, 2)
        return self.project(x), self.project.size_of(x)


class SoftSplit(nn.Conv2d):
    """`nn.Unfold` and a linear layer, a map `(N, C, H, W)` to tokens `(N, L, out)`.

    A split whose stride is over 3 takes what :class:`Packing` has made, and has a stride of 1.
    """

    def __init__(self, layer: nn.Linear, split: nn.Unfold):
        kernel, stride, padding = split_of(split)
        weight = layer.weight.data.unflatten(1, (-1, *kernel))
        if max(stride) > 3:
            (height, width), (rows, columns) = kernel, stride
            weight = nn.functional.pad(weight, (0, -width % columns, 0, -height % rows))
            weight = weight.unflatten(3, (-1, columns)).unflatten(2, (-1, rows))
            weight = weight.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)
            stride, padding = 1, 0
        super().__init__(weight.shape[1], len(weight), weight.shape[2:], stride, padding)
        self.weight.data, self.bias.data = weight, layer.bias.data

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).permute(0, 2, 3, 1).flatten(1, 2)

    def size_of(self, x: Tensor) -> tuple[int, int]:
        """`(h, w)` of the tokens of a map `x`."""
        return tuple((side + 2 * padding - kernel) // stride + 1 for side, kernel, stride, padding in zip(
            x.shape[2:], self.kernel_size, self.stride, self.padding, strict=True))


class Packing(nn.Module):
    """Makes channels of the pixels of one stride of a soft split, for chips that take strides of up to 3.

    `(N, C, H, W)`, padded as the split does, to `(N, rows * columns * C, h, w)`.
    """

    def __init__(self, split: nn.Unfold):
        super().__init__()
        self.kernel, self.stride, self.padding = split_of(split)

    def forward(self, x: Tensor) -> Tensor:
        sides = []
        for side, kernel, stride, padding in zip(x.shape[2:], self.kernel, self.stride, self.padding, strict=True):
            number = (side + 2 * padding - kernel) // stride + -(-kernel // stride)
            sides.append((number, padding, number * stride - side - padding))
        (height, top, bottom), (width, left, right) = sides
        x = nn.functional.pad(x, (left, right, top, bottom)).permute(0, 2, 3, 1)
        # In four dimensions.
        x = x.reshape(len(x) * height, self.stride[0], width, -1).transpose(1, 2)
        return x.reshape(-1, height, width, math.prod(x.shape[2:])).permute(0, 3, 1, 2)


def split_of(split: nn.Unfold) -> tuple[tuple[int, int], ...]:
    """Kernel, stride and padding, for height and width each."""
    return tuple(to_2tuple(each) for each in (split.kernel_size, split.stride, split.padding))


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
    parts = [nn.Linear(layer.in_features, layer.out_features // 3, layer.bias is not None) for _ in range(3)]
    for name, parameter in layer.named_parameters():
        for part, third in zip(parts, parameter.chunk(3), strict=True):
            getattr(part, name).data.copy_(third)
    return parts


def followed_by(layer: nn.Linear, matrix: Tensor) -> nn.Linear:
    """A linear layer and a matrix `(out, in)` behind it as one layer."""
    both = nn.Linear(layer.in_features, len(matrix))
    both.weight.data, both.bias.data = matrix @ layer.weight.data, matrix @ layer.bias.data
    return both


def half_square(x: Tensor) -> Tensor:
    """`|x|^2 / 2` of each token, `(..., 1)`."""
    return x.square().sum(-1, keepdim=True) / 2


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
    normalization = as_convolution(graph.pixels)
    first = None if graph.pixels.enhancing else _first_convolution(graph, images)
    if first is not None:
        bias = torch.einsum('oihw,i->o', first.weight, normalization.bias)
        first.bias = nn.Parameter(bias if first.bias is None else first.bias + bias, requires_grad=False)
        weight = torch.einsum('oihw,ij->ojhw', first.weight, normalization.weight[..., 0, 0])
        first.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        normalization = nn.Identity()
    graph.pixels.normalization = normalization
    graph.pixels.mean = graph.pixels.std = None  # a file would keep them
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
    is_folded = len(readers) == 1 and isinstance(readers[0], nn.Conv2d) and readers[0].groups == 1 and not any(
        readers[0].padding)
    return readers[0] if is_folded else None
