"""No normalization at all, the lower bound of every comparison."""
from __future__ import annotations

import torch
from torch import Tensor

from ..registry import MODELS
from .base import Norm


@MODELS.register_module()
class NoNorm(Norm):
    """The identity.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        eps (float): not used; OpenMMLab's builders pass one to every norm.
    """

    def __init__(self, num_features: int, eps: float = 1e-5):
        super().__init__(num_features)
        self.register_buffer('_nothing', torch.empty(0), persistent=False)  # has the device

    def affine(self) -> tuple[Tensor, Tensor]:
        """`scale` and `shift` of `y = scale * x + shift`: two `(C,)` float64 tensors."""
        ones = torch.ones(self.num_features, dtype=torch.float64, device=self._nothing.device)
        return ones, torch.zeros_like(ones)

    def _normalize(self, x: Tensor) -> Tensor:
        return x
