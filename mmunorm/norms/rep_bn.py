"""RepBN of SLAB (Guo et al., ICML 2024): BatchNorm with a linear term."""
from __future__ import annotations

import torch
from torch import nn

from ..registry import MODELS
from .token_bn import TokenBN


@MODELS.register_module()
class RepBN(TokenBN):
    """`RepBN(x) = BN(x) + eta * x` with a learnable scalar `eta` that starts at 1.

    Arguments are those of :class:`TokenBN`. Additional state: `eta` (1).
    """

    def __init__(self, num_features: int, alpha: float = 0.9, eps: float = 1e-5):
        super().__init__(num_features, alpha=alpha, eps=eps)
        self.eta = nn.Parameter(torch.ones(1))
