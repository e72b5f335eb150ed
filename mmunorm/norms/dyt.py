"""Dynamic Tanh (Zhu et al., "Transformers without Normalization", CVPR 2025) and Dynamic erf (Chen et al.,
"Stronger Normalization-Free Transformers", arXiv 2512.10938)."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..registry import MODELS
from .base import Norm, check_positive
from .kernels.reference import statistics_dtype


@MODELS.register_module()
class DyT(Norm):
    """`y = weight * tanh(alpha * x) + bias` with a learnable scalar `alpha`; has no statistics.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        init_alpha (float): first value of `alpha`, positive. Defaults to 0.5.
        eps (float): not used; OpenMMLab's builders pass one to every norm.
    """
    fold_obstacle = 'applies a tanh to every element at inference'

    def __init__(self, num_features: int, init_alpha: float = 0.5, eps: float = 1e-5):
        super().__init__(num_features)
        self.alpha = nn.Parameter(torch.full((1, ), float(check_positive('init_alpha', init_alpha))))
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def _normalize(self, x: Tensor) -> Tensor:
        dtype = statistics_dtype(x.dtype)
        squashed = self._squash(x.to(dtype))
        return torch.addcmul(self.bias.to(dtype), squashed, self.weight.to(dtype)).to(x.dtype)

    def _squash(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha.to(x.dtype) * x)


@MODELS.register_module()
class Derf(DyT):
    """`y = weight * erf(alpha * x + shift) + bias` with learnable scalars `alpha` and `shift`, which starts at 0.

    Arguments are those of :class:`DyT`. Additional state: `shift` (1).
    """
    fold_obstacle = 'applies an erf to every element at inference'

    def __init__(self, num_features: int, init_alpha: float = 0.5, eps: float = 1e-5):
        super().__init__(num_features, init_alpha=init_alpha, eps=eps)
        self.shift = nn.Parameter(torch.zeros(1))

    def _squash(self, x: Tensor) -> Tensor:
        return torch.erf(self.alpha.to(x.dtype) * x + self.shift.to(x.dtype))
