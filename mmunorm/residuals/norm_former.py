"""NormFormer (arXiv 2110.09456): PreNorm with a norm after the attention, one inside the FFN, and scaled heads."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import RESIDUALS, Place
from .pre_norm import PreNorm


class HeadScale(nn.Module):
    """Scales the output of each attention head with one learned number; the parameter `weight` `(heads,)` starts at 1.

    Args:
        num_heads (int): heads.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads))

    def forward(self, x: Tensor) -> Tensor:
        """`(..., heads * d)` to the same shape."""
        return (x.unflatten(-1, (len(self.weight), -1)) * self.weight.unsqueeze(-1)).flatten(-2)


@RESIDUALS.register_module()
class NormFormer(PreNorm):
    """`x' = x + LN(attention(LN(x)))` with scaled heads, and `x' = x + FFN(LN(x))` with a norm before fc2."""

    def __init__(self, place: Place):
        super().__init__(place)
        sublayer = place.sublayer
        if sublayer.is_attention:
            self.norm = place.build_norm()
            sublayer.put_before_last('scale', HeadScale(sublayer.parent.num_heads))
        else:
            sublayer.put_before_last('norm', place.build_norm(sublayer.last.in_features))
