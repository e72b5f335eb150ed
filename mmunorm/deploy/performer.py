"""T2T-ViT's tokens-to-token module for edge devices."""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .windows import is_exactly, split_qkv


class EdgePerformer(nn.Module):
    """The Performer for 8 bits: `phi(q)` divided by its sum is a softmax over `w q`.

    The random directions `w` are folded into the layer of the queries. Each feature of the keys is divided by its
    largest value over the tokens, whose logarithm is added to `w q`, so that all features use the whole range of 8
    bits. The `eps` of the quotient becomes an additional feature, of `N` keys with value 0. For long queries it has all
    the weight, and the attention is 0, as in the stock layer.
    """

    def __init__(self, stock: nn.Module, eps: float = 1e-8):
        super().__init__()
        self.key, self.query, self.value = split_qkv(stock.kqv)
        self.queries, self.keys = followed_by(self.query, stock.w), followed_by(self.key, stock.w)
        self.proj = stock.proj
        self.rest = math.log(eps * len(stock.w))
        self.register_buffer('least', torch.tensor(1e-30), False)  # in an integer file, one step

    def forward(self, x: Tensor) -> Tensor:
        """`(B, N, input_dims)` to `(B, N, embed_dims)`."""
        v = self.value(x)
        tokens = v.shape[1]
        rest = half_square(self.query(x)) + (self.rest - math.log(tokens))
        scores = half_square(self.key(x)) - self.keys(x)  # of opposite sign: the quantizer knows no maximum
        least = scores.amin(1, keepdim=True)
        q_features = torch.cat([self.queries(x) - least, rest], -1).softmax(-1)
        k_features = torch.exp(least - scores)
        products = (k_features.transpose(1, 2) @ v)[:, None]  # Sophgo's compiler fails to pad three dimensions
        weighted = q_features @ nn.functional.pad(products, (0, 0, 0, 1)).squeeze(1)
        total = q_features @ nn.functional.pad(k_features.sum(1), (0, 1), value=tokens).unsqueeze(-1)
        return v + self.proj(weighted / torch.maximum(total, self.least))


def is_folded_t2t(module: nn.Module) -> bool:
    """Whether the soft splits of a tokens-to-token module are consumed only by linear layers."""
    return is_exactly(module, 'mmunorm.backbones.t2t_vit.T2TModule') and all(
        is_performer(getattr(layer, 'attn', None)) and isinstance(layer.ln1, nn.Identity)
        for layer in (module.attention1, module.attention2))


def is_performer(module: nn.Module | None) -> bool:
    """Whether :class:`EdgePerformer` can replace a module."""
    return is_exactly(module, 'mmunorm.backbones.performer.PerformerAttention')


class EdgeT2T(nn.Module):
    """A tokens-to-token module without norms: a soft split and the linear layer after it are one convolution."""

    def __init__(self, stock: nn.Module):
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
            # With flatten(2) and transpose(1, 2) instead, LiteRT's converter confuses the two dimensions.
            x = step(x).unflatten(1, step.attn.value.size_of(x)).permute(0, 3, 1, 2)
        return self.project(x), self.project.size_of(x)


class SoftSplit(nn.Conv2d):
    """`nn.Unfold` and a linear layer, a map `(N, C, H, W)` to tokens `(N, L, out)`.

    A split with a stride over 3 takes the output of :class:`Packing`, and has a stride of 1.
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
    """Space-to-depth with the stride of a soft split, for chips that support strides up to 3.

    `(N, C, H, W)`, padded like the split, to `(N, rows * columns * C, h, w)`.
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
        # With four dimensions.
        x = x.reshape(len(x) * height, self.stride[0], width, -1).transpose(1, 2)
        return x.reshape(-1, height, width, math.prod(x.shape[2:])).permute(0, 3, 1, 2)


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """An int as a pair."""
    return (value, value) if isinstance(value, int) else tuple(value)


def split_of(split: nn.Unfold) -> tuple[tuple[int, int], ...]:
    """Kernel, stride and padding, each for height and width."""
    return tuple(map(pair, (split.kernel_size, split.stride, split.padding)))


def followed_by(layer: nn.Linear, matrix: Tensor) -> nn.Linear:
    """A linear layer followed by a matrix `(out, in)`, as one layer."""
    both = nn.Linear(layer.in_features, len(matrix))
    both.weight.data, both.bias.data = matrix @ layer.weight.data, matrix @ layer.bias.data
    return both


def half_square(x: Tensor) -> Tensor:
    """`|x|^2 / 2` of each token, `(..., 1)`."""
    return x.square().sum(-1, keepdim=True) / 2
