"""LayerScale of CaiT (Touvron et al., arXiv 2103.17239): each channel of a branch has a small learned weight."""
from __future__ import annotations

import torch
from torch import nn

from .base import RESIDUALS, Place, Scale
from .pre_norm import PreNorm


@RESIDUALS.register_module()
class LayerScale(PreNorm):
    """`x' = x + diag(l) F(LN(x))` with the parameter `weight` l `(C,)`.

    Args:
        init_value (float, optional): what l starts with. Defaults to None, for CaiT's choice by the depth of the
            model: 0.1 to depth 18, 1e-5 to 24, 1e-6 above.

    Raises:
        ValueError: `init_value` is no number, or it is None and the depth of the model is not known.
    """

    def __init__(self, place: Place, init_value: float | None = None):
        super().__init__(place)
        if init_value is None:
            if place.depth is None:
                raise ValueError('init_value: must be a number where the depth of the model is not known, got None')
            init_value = 0.1 if place.depth <= 18 else 1e-5 if place.depth <= 24 else 1e-6
        elif isinstance(init_value, bool) or not isinstance(init_value, (int, float)):
            raise ValueError(f'init_value must be a number, or None for CaiT\'s choice, got {init_value!r}')
        self.weight = nn.Parameter(torch.full((place.channels, ), float(init_value)))

    def scales(self) -> tuple[Scale, Scale]:
        return None, self.weight
