"""RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019)."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..compat import rms_norm
from ..registry import MODELS
from .base import Norm, check_positive
from .kernels.reference import statistics_dtype


@MODELS.register_module()
class RMSN(Norm):
    """`y = weight * x / sqrt(mean over channels of x^2 + eps)` for every token; equals `torch.nn.RMSNorm`.

    As in the paper there is a gain and no bias: from an LN checkpoint it loads `weight`.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        eps (float): added to the mean square. Defaults to 1e-5.
    """
    fold_obstacle = 'computes a mean square for every token at inference'

    def __init__(self, num_features: int, eps: float = 1e-5):
        super().__init__(num_features)
        self.eps = check_positive('eps', eps)
        self.weight = nn.Parameter(torch.ones(num_features))

    def _normalize(self, x: Tensor) -> Tensor:
        return divide_by_rms(x, self.eps, self.weight)

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, eps={self.eps}'


def divide_by_rms(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Each token divided by its root mean square, times `weight` `(C,)`; computed in float32, returned in `x.dtype`."""
    dtype = statistics_dtype(x.dtype)
    weight = None if weight is None else weight.to(dtype)
    return rms_norm(x.to(dtype), weight, eps).to(x.dtype)
