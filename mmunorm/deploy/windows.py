"""The shifted window attention of mmdet's and mmpretrain's Swins, rewritten for exporters.

What the stock code computes in each call, and writes into in place, follows from the size of the map here: the
position bias, which windows a shift has cut, and the padding, with the token that a folded norm needs
(`mmunorm/fusion/padding.py`): an exporter that pads with zeros is wrong on a folded model, and nothing says so.
"""
from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from mmpretrain.models.utils import ShiftWindowMSA, WindowMSA
from torch import Tensor, nn

from ..norms.replace import replace_modules


class StaticWindowMSA(nn.Module):
    """A shifted window attention, stock or with the padding of a folded norm, for maps whose size is known.

    It shares the parameters of `stock`, mmpretrain's or mmdet's `ShiftWindowMSA`.
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
        is_marker = torch.arange(stock.w_msa.embed_dims) == marker
        self.register_buffer('is_marker', is_marker if marker >= 0 else None)

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
                                 'the images must be larger, or the backbone needs pad_small_map=True')
            shift = 0
        x = self._pad(query.unflatten(1, (height, width)))
        if shift:
            x = self._roll(x, -shift)
        rows, columns = x.shape[1] // window, x.shape[2] // window
        x = self._attend(x, rows, columns, self._cut(x, rows, columns) if shift else None)
        if shift:
            x = self._roll(x, shift)
        return x[:, :height, :width].flatten(1, 2)

    def _cut(self, x: Tensor, rows: int, columns: int) -> Tensor:
        return cut_windows(rows, columns, self.window_size, self.shift_size).to(x.device)

    def _roll(self, x: Tensor, shift: int) -> Tensor:
        return x.roll((shift, shift), (1, 2))

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

    def _attend(self, x: Tensor, rows: int, columns: int, cut: Tensor | None) -> Tensor:
        """Attention within the windows of a map `(B, rows * window, columns * window, C)`, to the same shape.

        `cut` is `(rows * columns, tokens, tokens)`, see :func:`cut_windows`.
        """
        batch, window, channels = x.shape[0], self.window_size, x.shape[-1]
        x = x.reshape(batch, rows, window, columns, window, channels).transpose(2, 3)
        x = x.reshape(batch * rows * columns, window**2, channels)
        # Cut into three before the heads are: see "What is rewritten" in docs/exported_files.md.
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q * self.scale) @ k.transpose(-2, -1)
        if cut is None:
            scores = scores + self.bias
        elif isinstance(batch, int) and batch == 1:  # no more dimensions than the runtimes' attention kernels know
            scores = scores + (self.bias + cut[:, None])
        else:
            scores = scores.unflatten(0, (batch, -1)) + (self.bias + cut[:, None])
            scores = scores.flatten(0, 1)
        x = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x.reshape(batch, rows, columns, window, window, channels).transpose(2, 3)
        return x.reshape(batch, rows * window, columns * window, channels)


class DynamicWindowMSA(StaticWindowMSA):
    """The same for maps whose size is known only when the graph runs.

    One gather along each side pads and shifts, so that nothing in the graph depends on whether there is something to
    pad. A map smaller than a window is padded to one, where the stock attention may refuse it.
    """

    def forward(self, query: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """As the stock method: `query` is `(B, H * W, C)`."""
        height, width = hw_shape
        window, shift = self.window_size, self.shift_size
        rows, columns = (height + window - 1) // window, (width + window - 1) // window
        places = [torch.arange(number * window) for number in (rows, columns)]
        cut = cut_windows(rows, columns, window, shift) if shift else None
        stays = None
        if shift and not self.pad_small_map:
            # Nothing is shifted where a side of the map is no longer than a window.
            stays = (torch.arange(height) < window).all() | (torch.arange(width) < window).all()
            cut = torch.where(stays, 0., cut)

        x = query.unflatten(1, (height, width))
        if self.is_marker is not None:
            x = torch.where(self.is_marker, 0., x)
        down, right = (_rolled(place, shift, stays) for place in places)
        is_row, is_column = down < height, right < width
        x = x.index_select(1, torch.where(is_row, down, 0)).index_select(2, torch.where(is_column, right, 0))
        fill = torch.zeros(()) if self.pad_value is None else self.pad_value
        x = torch.where((is_row[:, None] & is_column)[..., None], x, fill)

        x = self._attend(x, rows, columns, cut)
        down, right = (_rolled(place, -shift, stays) for place in places)
        return x.index_select(1, down[:height]).index_select(2, right[:width]).flatten(1, 2)


def _rolled(place: Tensor, by: int, stays: Tensor | None) -> Tensor:
    """The places `(n, )` after `roll(-by)`, or as they are where `stays`, a bool, is True."""
    rolled = torch.cat([place[by:], place[:by]]) if by else place
    return rolled if stays is None else torch.where(stays, place, rolled)


def cut_windows(rows: int, columns: int, window: int, shift: int) -> Tensor:
    """Ten times `ShiftWindowMSA.get_attn_mask`: -1000 between tokens of one window that a shift has brought together.

    After a softmax, -100 leaves 4e-44, which float32 has as a denormal number: CPUs take much longer to multiply it.
    -1000 leaves 0. Returns `(rows * columns, window**2, window**2)`. In the graph it stays a comparison of two short
    vectors, which runtimes compute once; written out, a detector's masks have as many bytes as its weights.
    """
    # Counted from the end: the last window is one region for itself, and what was shifted into it another.
    down, right = (torch.arange(number * window).flip(0) for number in (rows, columns))
    down, right = ((place < window).long() + (place < shift) for place in (down, right))
    region = (3 * down[:, None] + right).reshape(rows, window, columns, window)
    region = region.transpose(1, 2).reshape(rows * columns, window**2).float()
    return torch.where(region[:, None] == region[:, :, None], 0., -1000.)


def with_windows(model: nn.Module, dynamic: bool = False) -> nn.Module:
    """A copy of a model with a :class:`StaticWindowMSA` in place of each shifted window attention.

    A `dynamic` one has a :class:`DynamicWindowMSA`, for images of any size whose sides are multiples of
    :func:`side_multiple`. Its paddings go: such images need none.
    """
    model = replace_modules(copy.deepcopy(model), is_window_attention, DynamicWindowMSA if dynamic else StaticWindowMSA)
    return replace_modules(model, _is_padding, lambda padding: nn.Identity()) if dynamic else model


def side_multiple(backbone: nn.Module) -> int | None:
    """What height and width must be multiples of so that a Swin pads no map before its windows.

    None for a backbone whose height and width cannot be left open.
    """
    paddings = [module for module in backbone.modules() if _is_padding(module)]
    is_open = (paddings and not getattr(backbone, 'use_abs_pos_embed', False)
               and any(map(is_window_attention, backbone.modules()))
               and all(tuple(padding.kernel_size) == tuple(padding.stride) for padding in paddings))
    return math.prod(padding.stride[0] for padding in paddings) if is_open else None


def _is_padding(module: nn.Module) -> bool:
    """Whether it is mmcv's or mmdet's AdaptivePadding of a patch embedding or a patch merging."""
    return type(module).__name__ == 'AdaptivePadding'


def is_window_attention(module: nn.Module) -> bool:
    """Whether :class:`StaticWindowMSA` can replace a module."""
    if not isinstance(module, ShiftWindowMSA) and not any(
            f'{cls.__module__}.{cls.__name__}' == 'mmdet.models.backbones.swin.ShiftWindowMSA'
            for cls in type(module).__mro__):
        return False
    # Swin V2's attention has another formula. mmdet has a WindowMSA of its own, with the names of mmpretrain's.
    return isinstance(module.w_msa, WindowMSA) or type(module.w_msa).__module__ == 'mmdet.models.backbones.swin'


def thirds(layer: nn.Linear) -> list[nn.Linear]:
    """Three linear layers that make a third each of what a layer makes."""
    parts = [nn.Linear(layer.in_features, layer.out_features // 3, layer.bias is not None) for _ in range(3)]
    for name, parameter in layer.named_parameters():
        for part, third in zip(parts, parameter.chunk(3), strict=True):
            getattr(part, name).data.copy_(third)
    return parts
