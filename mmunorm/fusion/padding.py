"""The padding trap: window attention pads with zeros between a norm and its reader.

A padded token gives `W @ 0 + b` before folding, and `b + W @ shift` after. So the folded module pads with the
token that the norm would have turned into zero, `-shift / scale`; then `W' @ fill + b' = b`. Where the
scale is zero there is no such value: the norm's output is the constant shift. The input of such a channel means
nothing to the norm, so one of them, the marker, can say which tokens are padded: 0 on real tokens, 1 on padded ones.
Its weights are `-W @ shift` over all channels that are 0 in the padding token: those without a scale, and those whose
`-shift / scale` float16 could not hold.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A channel that would need a larger value counts as one whose scale is zero. float32 and bfloat16 can hold this one.
LARGEST_FILL = 1e28


class Fill(NamedTuple):
    """The token to pad with, instead of a zero token after a norm."""
    value: Tensor  # (C,) float64; in the type of the weights where a module gets it
    marker: int = -1  # the channel that tells padded tokens (1) from real ones (0); -1 where none is needed
    undone: Tensor | None = None  # (C,) bool: the channels whose shift the marker undoes

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether a dtype can hold the token."""
        return self.value.abs().max().item() <= largest_value(dtype)


def largest_value(dtype: torch.dtype) -> float:
    """The largest number that a folded model may hold in a dtype: its products with small weights stay precise."""
    return torch.finfo(dtype).max**0.75


def zero_token(scale: Tensor, shift: Tensor) -> Fill:
    """The token that `scale * x + shift` turns into zero; both `(C,)` float64."""
    value = torch.where(shift == 0, 0., -shift / scale)
    is_constant = ~(value.abs() <= LARGEST_FILL)
    if not is_constant.any():
        return Fill(value)
    undone = ~(value.abs() <= largest_value(torch.float16))
    value = torch.where(undone, 0., value)
    marker = int(is_constant.nonzero()[0])
    value[marker] = 1
    return Fill(value, marker, undone)


def fill_up(x: Tensor, below: int, right: int, value: Tensor) -> Tensor:
    """A copy of the map `(B, H, W, C)` with tokens `value` `(C,)` added at the bottom and to the right."""
    _, height, width, _ = x.shape  # unpacked: in a trace, a slice of it would be constant
    padding = (0, 0, 0, right, 0, below)
    if torch.jit.is_tracing():  # where writing to a part is constant in size, too
        return F.pad(x, padding) + (1 - F.pad(x.new_ones(1, height, width, 1), padding)) * value
    x = F.pad(x, padding) if below or right else x.clone()  # padding by nothing may return its argument
    x[:, height:] = value
    x[:, :height, width:] = value
    return x


class NeutralPadding(nn.Module):
    """For a window attention: pads with a given token instead of zeros. :func:`become` mixes it in.

    The buffer `pad_value` `(C,)` is the token, `marker` the channel of :class:`Fill`.
    """

    def must_fill(self, height: int, width: int, window: tuple[int, int]) -> bool:
        """Whether a map of this size needs :meth:`fill` before it is cut into windows.

        A trace always fills: it is run at other sizes too, where what it has decided at this one may be wrong.
        """
        return torch.jit.is_tracing() or self.marker >= 0 or height % window[0] > 0 or width % window[1] > 0

    def fill(self, x: Tensor, window: tuple[int, int]) -> Tensor:
        """A copy of the map `(B, H, W, C)`, filled up at bottom and right to multiples of `window`."""
        _, height, width, _ = x.shape
        x = fill_up(x, -height % window[0], -width % window[1], self.pad_value)
        if self.marker >= 0:
            x[:, :height, :width, self.marker] = 0
        return x

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.marker)

    def set_extra_state(self, state: Tensor) -> None:
        self.marker = int(state)


def become(module: nn.Module, cls: type[NeutralPadding], fill: Fill) -> None:
    """Makes `module` an instance of `cls`, a subclass of its class: names in its `state_dict` stay."""
    module.__class__ = cls
    module.register_buffer('pad_value', fill.value)
    module.marker = fill.marker  # a plain int, so that no forward pass waits for a tensor's value
