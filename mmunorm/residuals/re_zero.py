"""ReZero (arXiv 2003.04887): no norm, and one learned number a layer, which starts at 0."""
from __future__ import annotations

import torch
from torch import nn

from .base import RESIDUALS, Place, Scale
from .pre_norm import PreNorm


@RESIDUALS.register_module()
class ReZero(PreNorm):
    """`x' = x + g F(x)`, for models without a norm; the sublayers of a layer share `gain` `()`, which starts at 0."""
    without_norm = True

    def __init__(self, place: Place):
        super().__init__(place)
        if place.is_first:
            self.gain = nn.Parameter(torch.zeros(()))
        # In a tuple, so that it is no child: the parameter has one name, and an optimizer meets it once.
        self._owner = (self, ) if place.is_first else place.previous._owner

    def scales(self) -> tuple[Scale, Scale]:
        return None, self._owner[0].gain
