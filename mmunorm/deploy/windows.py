"""The shifted window attention of mmdet's and mmpretrain's Swins, rewritten for maps whose size is known.

What the stock code computes in each call, and writes into in place, is constant here: the position bias, which
windows a shift has cut, and the padding, with the token that a folded norm needs (see `mmunorm/fusion/padding.py`;
an exporter that pads with zeros is wrong on a folded model, and nothing says so).
"""
from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from mmpretrain.models.utils import ShiftWindowMSA, WindowMSA
from torch import Tensor, nn


class StaticWindowMSA(nn.Module):
    """A shifted window attention, stock or with the padding of a folded norm.

    Args:
        stock (nn.Module): mmpretrain's or mmdet's `ShiftWindowMSA`; its parameters are shared.
    """

    def __init__(self, stock: nn.Module):
        super().__init__()
        self.qkv, self.proj = stock.w_msa.qkv, stock.w_msa.proj
        self.num_heads, self.scale = stock.w_msa.num_heads, stock.w_msa.scale
        self.window_size, self.shift_size = stock.window_size, stock.shift_size
        # mmdet's class has no such argument, and pads always.
        self.pad_small_map = getattr(stock, 'pad_small_map', True)
        tokens = self.window_size**2
        table = stock.w_msa.relative_position_bias_table.detach()
        bias = table[stock.w_msa.relative_position_index.view(-1)].view(tokens, tokens, -1)
        self.register_buffer('bias', bias.permute(2, 0, 1).contiguous())
        self.register_buffer('pad_value', getattr(stock, 'pad_value', None))
        marker = getattr(stock, 'marker', -1)
        self.register_buffer('is_marker', F.one_hot(torch.tensor(marker), stock.w_msa.embed_dims).bool()
                             if marker >= 0 else None)

    def forward(self, query: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """As the stock method: `query` is `(B, H * W, C)`.

        Raises:
            ValueError: the map is smaller than a window, and `pad_small_map` is not set.
        """
        height, width = hw_shape
        window, shift = self.window_size, self.shift_size
        if not self.pad_small_map and min(height, width) <= window:
            if min(height, width) < window:
                raise ValueError(f'a map of {height} x {width} tokens is smaller than a window of {window}: '
                                 'the pictures must be larger, or the backbone needs pad_small_map=True')
            shift = 0
        x = self._pad(query.unflatten(1, (height, width)))
        if shift:
            x = x.roll((-shift, -shift), (1, 2))
        batch, rows, columns = x.shape[0], x.shape[1] // window, x.shape[2] // window
        x = x.reshape(batch, rows, window, columns, window, -1).transpose(2, 3).reshape(-1, window**2, x.shape[-1])
        cut = cut_windows(rows, columns, window, shift).to(x.device) if shift else None
        x = self._attend(x, cut, rows * columns)
        x = x.reshape(batch, rows, columns, window, window, -1).transpose(2, 3)
        x = x.reshape(batch, rows * window, columns * window, -1)
        if shift:
            x = x.roll((shift, shift), (1, 2))
        return x[:, :height, :width].reshape(batch, height * width, -1)

    def _pad(self, x: Tensor) -> Tensor:
        """Fills a map `(B, H, W, C)` up at bottom and right to whole windows."""
        if self.is_marker is not None:
            x = torch.where(self.is_marker, 0., x)
        down, right = -x.shape[1] % self.window_size, -x.shape[2] % self.window_size
        if self.pad_value is None:
            return F.pad(x, (0, 0, 0, right, 0, down)) if down or right else x
        if right:
            x = torch.cat([x, self.pad_value.expand(x.shape[0], x.shape[1], right, -1)], 2)
        if down:
            x = torch.cat([x, self.pad_value.expand(x.shape[0], down, x.shape[2], -1)], 1)
        return x

    def _attend(self, x: Tensor, cut: Tensor | None, num_windows: int) -> Tensor:
        """Attention within windows `(B * num_windows, tokens, C)`; `cut` is `(num_windows, tokens, tokens)`."""
        # Cut into three before the heads are: OpenVINO 2026.4.1 mixes up the memory of parts of one transposed map.
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q * self.scale) @ k.transpose(-2, -1)
        if cut is None:
            scores = scores + self.bias
        elif x.shape[0] == num_windows:  # one picture: no dimension more than the runtimes' attention kernels know
            scores = scores + (self.bias + cut[:, None])
        else:
            scores = scores.unflatten(0, (-1, num_windows)) + (self.bias + cut[:, None])
            scores = scores.flatten(0, 1)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def cut_windows(rows: int, columns: int, window: int, shift: int) -> Tensor:
    """`ShiftWindowMSA.get_attn_mask`: -100 between tokens of one window that a shift has brought together.

    Returns `(rows * columns, window**2, window**2)`. In the graph it stays a comparison of two short vectors, which
    runtimes compute once; written out, a detector's masks have as many bytes as its weights.
    """
    region = [torch.bucketize(torch.arange(number * window), torch.tensor(
        [(number - 1) * window, number * window - shift]), right=True) for number in (rows, columns)]
    region = (3 * region[0][:, None] + region[1]).reshape(rows, window, columns, window)
    region = region.transpose(1, 2).reshape(rows * columns, window**2).float()
    return torch.where(region[:, None] == region[:, :, None], 0., -100.)


def with_static_windows(model: nn.Module) -> nn.Module:
    """A copy of a model in which a :class:`StaticWindowMSA` stands for each shifted window attention."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_window_attention(child):
                setattr(parent, name, StaticWindowMSA(child))
    return model


def is_window_attention(module: nn.Module) -> bool:
    """Whether :class:`StaticWindowMSA` can stand in for a module."""
    if not isinstance(module, ShiftWindowMSA) and not any(
            f'{cls.__module__}.{cls.__name__}' == 'mmdet.models.backbones.swin.ShiftWindowMSA'
            for cls in type(module).__mro__):
        return False
    # Swin V2's attention has another formula. mmdet has a WindowMSA of its own, with the names of mmpretrain's.
    return isinstance(module.w_msa, WindowMSA) or type(module.w_msa).__module__ == 'mmdet.models.backbones.swin'
