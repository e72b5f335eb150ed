"""Folding through zero padding: window attention pads with zeros between a norm and its consumer.

A padded token yields `W @ 0 + b` before folding, and `b + W @ shift` after it. So the folded module pads with the
token that the norm maps to zero, `-shift / scale`; then `W' @ fill + b' = b`. Where the scale is zero, no such value
exists: the norm's output is the constant shift, whatever its input. One such channel, the marker, therefore marks
padded tokens: it is 0 on real tokens and 1 on padded ones. Its weights are `-W @ shift` over the channels with scale
zero, and those whose `-shift / scale` exceeds the range of float16; these are 0 in the padding token.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A channel that needs a larger value is treated as one with scale zero. float32 and bfloat16 can represent it.
LARGEST_FILL = 1e28


class Fill(NamedTuple):
    """The token to pad with before the position of a folded norm, instead of zeros after it."""
    value: Tensor  # (C,) float64; a module gets it in the dtype of its weights
    marker: int = -1  # the channel that is 1 in padded tokens and 0 in real ones; -1 if none is needed
    cancelled: Tensor | None = None  # (C,) bool: the channels whose shift the marker subtracts

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether a dtype can represent the token."""
        return self.value.abs().max().item() <= largest_value(dtype)


def largest_value(dtype: torch.dtype) -> float:
    """The largest number in a folded model of a dtype, so that products with small weights stay precise."""
    return torch.finfo(dtype).max**0.75


def zero_token(scale: Tensor, shift: Tensor) -> Fill:
    """The token that `scale * x + shift` maps to zero; both `(C,)` float64."""
    value = torch.where(shift == 0, 0., -shift / scale)
    is_constant = ~(value.abs() <= LARGEST_FILL)
    if not is_constant.any():
        return Fill(value)
    cancelled = ~(value.abs() <= largest_value(torch.float16))
    value = torch.where(cancelled, 0., value)
    marker = int(is_constant.nonzero()[0])
    value[marker] = 1
    return Fill(value, marker, cancelled)


def fill_up(x: Tensor, below: int, right: int, value: Tensor) -> Tensor:
    """A copy of the map `(B, H, W, C)` padded with tokens `value` `(C,)` at the bottom and on the right."""
    _, height, width, _ = x.shape  # unpacked: in a trace, a slice of it would be constant
    padding = (0, 0, 0, right, 0, below)
    if torch.jit.is_tracing():  # where writing to a part is constant in size, too
        return F.pad(x, padding) + (1 - F.pad(x.new_ones(1, height, width, 1), padding)) * value
    x = F.pad(x, padding) if below or right else x.clone()  # F.pad by 0 may return its argument
    if below:  # OpenVINO and ExecuTorch do not take an empty part
        x[:, height:] = value
    if right:
        x[:, :height, width:] = value
    return x


class NeutralPadding(nn.Module):
    """For a window attention: pads with a given token instead of zeros. :func:`filled` mixes it in.

    The buffer `pad_value` `(C,)` is the token, `marker` the channel of :class:`Fill`.
    """

    def must_fill(self, height: int, width: int, window: tuple[int, int]) -> bool:
        """Whether a map needs :meth:`fill` before it is partitioned into windows. A trace also runs at other sizes."""
        return torch.jit.is_tracing() or self.marker >= 0 or height % window[0] > 0 or width % window[1] > 0

    def fill(self, x: Tensor, window: tuple[int, int]) -> Tensor:
        """A copy of the map `(B, H, W, C)`, padded at the bottom and on the right to multiples of `window`."""
        _, height, width, _ = x.shape
        x = fill_up(x, -height % window[0], -width % window[1], self.pad_value)
        if self.marker >= 0:
            x[:, :height, :width, self.marker] = 0
        return x

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.marker)

    def set_extra_state(self, state: Tensor) -> None:
        self.marker = int(state)


def filled(module: nn.Module, cls: type[nn.Module], fill: Fill) -> nn.Module:
    """The same module as an instance of `cls`, a subclass of its class; it pads with the token of `fill`.

    The names in its `state_dict` are unchanged but for the token, `pad_value`.
    """
    new = cls.__new__(cls)
    vars(new).update(vars(module), _buffers=dict(module._buffers),
                     _non_persistent_buffers_set=set(module._non_persistent_buffers_set))
    new.register_buffer('pad_value', fill.value)
    new.marker = fill.marker  # a plain int, so that no forward pass waits for a tensor's value
    return new
