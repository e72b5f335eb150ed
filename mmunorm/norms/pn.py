"""PowerNorm (Shen et al., "PowerNorm: Rethinking Batch Normalization in Transformers", ICML 2020)."""
from __future__ import annotations

import torch
from torch import Tensor

from ..registry import MODELS
from .averages import finite_or
from .rmsn import divide_by_rms
from .step import Step
from .un import OfflineNorm


@MODELS.register_module()
class PN(OfflineNorm):
    """PowerNorm: normalizes by the moving average of the EARLIER steps' mean squares.

    The gradient is estimated with the running statistic `nu` of its Algorithm 2, the buffer `psi`.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        layer_scale (bool): whether to first divide each token by its own root mean square, as the authors do. The
            norm then needs each token's statistic at inference and cannot be folded. False is PN* of the UN paper.
            Defaults to True.
        alpha, warmup_iters, eps: as :class:`UN`'s, with its defaults; `alpha` is also that of `nu`.
    """

    def __init__(self, num_features: int, layer_scale: bool = True, alpha: float = 0.9,
                 warmup_iters: int | float = 4000, eps: float = 1e-5):
        super().__init__(num_features, alpha, warmup_iters, eps, has_psi=True)
        self.layer_scale = layer_scale
        if layer_scale:
            self.fold_obstacle = 'divides every token by its own root mean square at inference'

    def average(self, s: Tensor, averaged: Tensor, tokens: int | Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The running statistic before this step."""
        var_hat = torch.where(averaged, self.running_var, s)
        self._update_running_var(s)
        return var_hat, averaged, None

    def average_gradient(self, g: Tensor, step: Step) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`nu` before this step, and the next one (Algorithm 2 of the paper)."""
        z_squared = step.s * step.rstd.square()  # mean over tokens
        nu = self.psi * (1 - (1 - self.alpha) * z_squared) + (1 - self.alpha) * g
        return torch.where(step.averaged, self.psi, g), finite_or(nu, self.psi), None

    def statistics_input(self, x: Tensor) -> Tensor:
        """The tokens, with `layer_scale` each divided by its root mean square."""
        return divide_by_rms(x, self.eps) if self.layer_scale else x
