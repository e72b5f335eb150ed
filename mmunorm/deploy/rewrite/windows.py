"""The shifted window attention of mmdet's and mmpretrain's Swins for maps of any size.

The stock code traces with the sizes of a sample. Here all follows from the size of the map; the padding is the token of
a folded norm (`mmunorm/fusion/padding.py`), as zeros would be silently wrong.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...modules import is_any, replace_modules

_MODULES = ('mmpretrain.models.utils.attention', 'mmdet.models.backbones.swin')


class DynamicWindowMSA(nn.Module):
    """A shifted window attention, stock or with the padding of a folded norm, for maps of any size.

    One gather along each side pads and shifts, so the graph does not depend on whether padding is needed.
    """

    def __init__(self, stock: nn.Module):
        super().__init__()
        attention = stock.w_msa
        self.qkv, self.proj, self.num_heads, self.scale = (
            attention.qkv, attention.proj, attention.num_heads, attention.scale)
        self.window_size, self.shift_size = stock.window_size, stock.shift_size
        # mmdet's class has no such argument and always pads.
        self.pad_small_map = getattr(stock, 'pad_small_map', True)
        tokens = self.window_size**2
        table = attention.relative_position_bias_table.detach()
        bias = table[attention.relative_position_index.view(-1)].view(tokens, tokens, -1)
        self.register_buffer('bias', bias.permute(2, 0, 1).contiguous())
        self.register_buffer('pad_value', getattr(stock, 'pad_value', None))
        marker = getattr(stock, 'marker', -1)
        is_marker = torch.arange(attention.embed_dims) == marker
        self.register_buffer('is_marker', is_marker if marker >= 0 else None)

    def forward(self, query: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Like the stock method: `query` is `(B, H * W, C)`."""
        height, width = hw_shape
        window, shift = self.window_size, self.shift_size
        rows, columns = (height + window - 1) // window, (width + window - 1) // window
        positions = [torch.arange(number * window) for number in (rows, columns)]
        mask = shifted_window_mask(rows, columns, window, shift) if shift else None
        is_unshifted = None
        if shift and not self.pad_small_map:
            # A side of at most the window size is not shifted.
            is_unshifted = (torch.arange(height) < window).all() | (torch.arange(width) < window).all()
            mask = torch.where(is_unshifted, 0., mask)

        x = query.unflatten(1, (height, width))
        if self.is_marker is not None:
            x = torch.where(self.is_marker, 0., x)
        down, right = (_rolled(position, shift, is_unshifted) for position in positions)
        is_row, is_column = down < height, right < width
        x = x.index_select(1, torch.where(is_row, down, 0)).index_select(2, torch.where(is_column, right, 0))
        fill = torch.zeros(()) if self.pad_value is None else self.pad_value
        x = torch.where((is_row[:, None] & is_column)[..., None], x, fill)

        x = self._attend(x, rows, columns, mask)
        down, right = (_rolled(position, -shift, is_unshifted) for position in positions)
        return x.index_select(1, down[:height]).index_select(2, right[:width]).flatten(1, 2)

    def _attend(self, x: Tensor, rows: int, columns: int, mask: Tensor | None) -> Tensor:
        """Attention within the windows of a map `(B, rows * window, columns * window, C)`, to the same shape."""
        batch, window, channels = x.shape[0], self.window_size, x.shape[-1]
        x = x.reshape(batch * rows, window, columns, window * channels).transpose(1, 2)
        x = x.reshape(batch * rows * columns, window**2, channels)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores, bias = self.scale * q @ k.transpose(-2, -1), self.bias if mask is None else self.bias + mask[:, None]
        scores = scores + bias if mask is None else (scores.unflatten(0, (batch, -1)) + bias).flatten(0, 1)
        x = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x.reshape(batch * rows, columns, window, window * channels).transpose(1, 2)
        return x.reshape(batch, rows * window, columns * window, channels)


def _rolled(positions: Tensor, by: int, is_unshifted: Tensor | None) -> Tensor:
    """The indices `(n, )` after `roll(-by)`, or the same if `is_unshifted`, a bool tensor, is True."""
    rolled = torch.cat([positions[by:], positions[:by]]) if by else positions
    return rolled if is_unshifted is None else torch.where(is_unshifted, positions, rolled)


def shifted_window_mask(rows: int, columns: int, window: int, shift: int) -> Tensor:
    """`(rows * columns, window**2, window**2)`: -1000 between tokens of a window that are not adjacent in the map.

    The softmax of the stock mask's -100 is a denormal number, which slows down CPUs. In the graph it is a comparison of
    two short vectors, which runtimes compute once.
    """
    # Counted from the end: the last window is one region, and the tokens that were shifted into it another.
    down, right = (torch.arange(number * window).flip(0) for number in (rows, columns))
    down, right = ((position < window).long() + (position < shift) for position in (down, right))
    region = (3 * down[:, None] + right).reshape(rows, window, columns, window)
    region = region.transpose(1, 2).reshape(rows * columns, window**2).float()
    return torch.where(region[:, None] == region[:, :, None], 0., -1000.)


def for_any_size(model: nn.Module) -> nn.Module:
    """Makes a Swin take images whose sides are any multiples of :func:`side_multiple`, in place; returns it."""
    model = replace_modules(model, is_window_attention, DynamicWindowMSA)
    return replace_modules(model, _is_padding, lambda padding: nn.Identity())


def side_multiple(backbone: nn.Module) -> int | None:
    """What height and width must be multiples of so that a Swin needs no padding; None if its size is fixed."""
    paddings = [module for module in backbone.modules() if _is_padding(module)]
    is_open = (paddings and not getattr(backbone, 'use_abs_pos_embed', False)
               and any(map(is_window_attention, backbone.modules()))
               and all(tuple(padding.kernel_size) == tuple(padding.stride) for padding in paddings))
    return math.prod(padding.stride[0] for padding in paddings) if is_open else None


def _is_padding(module: nn.Module) -> bool:
    """Whether it is mmcv's or mmdet's AdaptivePadding of a patch embedding or a patch merging."""
    return type(module).__name__ == 'AdaptivePadding'


def is_window_attention(module: nn.Module) -> bool:
    """Whether :class:`DynamicWindowMSA` can replace a module."""
    # Swin V2's attention has another formula.
    return is_any(module, [f'{name}.ShiftWindowMSA' for name in _MODULES]) and is_any(
        module.w_msa, [f'{name}.WindowMSA' for name in _MODULES])
