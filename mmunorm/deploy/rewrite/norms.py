"""Norms without weights by single operators, for runtimes whose LayerNorm has no integer kernel or is no operator."""
from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ...fusion import FoldedLayerNorm, FoldedRMSNorm
from ...modules import replace_modules


class SingleOperators(nn.Module):
    """`x / sqrt(mean of squares + eps)` after the mean of each token, unless it is 0 already, is subtracted."""

    def __init__(self, norm: FoldedLayerNorm | FoldedRMSNorm):
        super().__init__()
        eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
        self.is_centered = getattr(norm, 'is_centered', True)  # an RMSNorm does not say so
        self.shift = float(getattr(norm, 'is_padded', False))
        self.linear, self.channels_first = norm.linear, norm.channels_first
        width = len(norm.weight)
        self.mean = nn.Linear(width, 1)  # and eps: one operator, which XNNPACK has in 8 bits
        nn.init.constant_(self.mean.weight, 1 / width)
        nn.init.constant_(self.mean.bias, eps)

    def forward(self, x: Tensor, data_format: str = 'channel_first') -> Tensor:
        """As the norm's."""
        is_map = self.channels_first and data_format == 'channel_first'
        x = x.movedim(1, -1) if is_map else x
        if not self.is_centered:
            x = x - x.mean(-1, keepdim=True)
        x = x * self.mean(x.square()).rsqrt()
        x = x + self.shift if self.shift else x
        x = x if self.linear is None else self.linear(x)
        return x.movedim(-1, 1) if is_map else x


def by_single_operators(graph: nn.Module) -> nn.Module:
    """A copy of a graph whose norms without weights are :class:`SingleOperators`."""
    return replace_modules(copy.deepcopy(graph), lambda module: isinstance(module, (FoldedLayerNorm, FoldedRMSNorm)),
                           SingleOperators)
