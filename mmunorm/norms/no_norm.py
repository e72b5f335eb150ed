"""No normalization at all, the lower bound of every comparison."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..registry import MODELS
from .base import Norm
from .kernels.reference import affine


@MODELS.register_module()
class NoNorm(Norm):
    """The identity; with `affine`, `y = weight * x + bias`.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        affine (bool): whether to learn `weight` and `bias` (C). Defaults to False.
        eps (float): not used; OpenMMLab's builders pass one to every norm.
    """

    def __init__(self, num_features: int, affine: bool = False, eps: float = 1e-5):
        super().__init__(num_features)
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    def affine(self) -> tuple[Tensor, Tensor]:
        """`scale` and `shift` of `y = scale * x + shift`: two `(C,)` float64 tensors."""
        if self.weight is None:
            ones = torch.ones(self.num_features, dtype=torch.float64)
            return ones, torch.zeros_like(ones)
        return self.weight.detach().double(), self.bias.detach().double()

    def _normalize(self, x: Tensor) -> Tensor:
        return x if self.weight is None else affine(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, affine={self.weight is not None}'
