"""BatchNorm over tokens (Ioffe and Szegedy, ICML 2015)."""
from __future__ import annotations

from torch import Tensor

from ..registry import MODELS
from .averages import finite_or
from .un import OfflineNorm


@MODELS.register_module()
class TokenBN(OfflineNorm):
    """BatchNorm over tokens: `torch.nn.BatchNorm1d` on `(tokens, C)`, with pad masks.

    Output, gradient, running statistics and the names in `state_dict` are torch's. A single token has variance 0,
    where torch raises an error.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        alpha (float): weight of the OLD value in the running statistics, in [0, 1); 1 minus torch's
            momentum. Defaults to 0.9.
        eps (float): added to the variance. Defaults to 1e-5.
    """

    def __init__(self, num_features: int, alpha: float = 0.9, eps: float = 1e-5):
        super().__init__(num_features, alpha, None, eps, centered=True)

    def average(self, s: Tensor, averaged: Tensor, tokens: int | Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The statistics of this step; as in torch's BatchNorm, the running variance is the unbiased one."""
        if isinstance(tokens, Tensor):
            correction = tokens.clamp(min=1) / (tokens - 1).clamp(min=1)
        else:
            correction = max(tokens, 1) / max(tokens - 1, 1)
        self._update_running_var(finite_or(s * correction, self.running_var))
        return s, averaged, None
