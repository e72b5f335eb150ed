"""Dynamic erf (Chen et al., "Stronger Normalization-Free Transformers", arXiv 2512.10938)."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..registry import MODELS
from .dyt import DyT


@MODELS.register_module()
class Derf(DyT):
    """`y = weight * erf(alpha * x + shift) + bias` with learnable scalars `alpha` and `shift`, which starts at 0.

    Arguments are those of :class:`DyT`. State: `shift` (1) beside its.
    """
    fold_obstacle = 'applies an erf to every element at inference'

    def __init__(self, num_features: int, init_alpha: float = 0.5, eps: float = 1e-5):
        super().__init__(num_features, init_alpha=init_alpha, eps=eps)
        self.shift = nn.Parameter(torch.zeros(1))

    def _squash(self, x: Tensor) -> Tensor:
        return torch.erf(self.alpha.to(x.dtype) * x + self.shift.to(x.dtype))
