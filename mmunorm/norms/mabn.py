"""MABN (Yan et al., "Towards Stabilizing Batch Statistics in Backward Propagation of Batch Normalization",
ICLR 2020)."""
from __future__ import annotations

import torch
from torch import Tensor

from ..registry import MODELS
from .averages import arithmetic_mean, push
from .base import check_count
from .step import Step
from .un import OfflineNorm


@MODELS.register_module()
class MABN(OfflineNorm):
    """Moving average BN: normalizes by a moving average of the mean square.

    The gradient is estimated by the arithmetic mean of the last `window` gradient statistics. The paper centers the
    weights of the preceding layer instead of the activations; this package, as in UN's comparison, does not.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        window (int): gradient statistics that are averaged. Defaults to 16, the authors' value.
        alpha, warmup_iters, eps: as :class:`UN`'s, with its defaults. (MABN's own paper has an `alpha` of
            0.98, for longer runs: the average then lags by 50 steps.)
    """

    def __init__(self, num_features: int, window: int = 16, alpha: float = 0.9, warmup_iters: int | float = 4000,
                 eps: float = 1e-5):
        check_count('window', window, minimum=1)
        super().__init__(num_features, alpha, warmup_iters, eps, gradients=window, has_psi=True)
        self.window = window

    def average(self, s: Tensor, averaged: Tensor, tokens: int | Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Eq. 13: the moving average, which is also the running statistic."""
        self._update_running_var(s)
        return torch.where(averaged, self.running_var, s), averaged, None

    def average_gradient(self, g: Tensor, step: Step) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Eq. 14: the arithmetic mean of the last M."""
        record = push(self.gradient_record, g)
        psi = torch.where(step.averaged, arithmetic_mean(record), g)
        return psi, psi, record
