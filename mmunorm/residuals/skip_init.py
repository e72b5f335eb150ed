"""SkipInit (De and Smith, arXiv 2002.10444): one learned number for each branch, which starts at 0."""
from __future__ import annotations

import torch
from torch import nn

from .base import RESIDUALS, Place, Scale
from .pre_norm import PreNorm


@RESIDUALS.register_module()
class SkipInit(PreNorm):
    """`x' = x + g F(LN(x))`; the parameter `gain` `()` of each sublayer starts at 0."""

    def __init__(self, place: Place):
        super().__init__(place)
        self.gain = nn.Parameter(torch.zeros(()))

    def scales(self) -> tuple[Scale, Scale]:
        return None, self.gain
