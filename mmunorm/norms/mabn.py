"""MABN (Yan et al., "Towards Stabilizing Batch Statistics in Backward Propagation of Batch Normalization",
ICLR 2020)."""
from __future__ import annotations

from ..registry import MODELS
from .un import OfflineNorm


@MODELS.register_module()
class MABN(OfflineNorm):
    """Moving average BN: normalizes by a moving average of the mean square.

    The gradient is estimated by the arithmetic mean of the last `window` gradient statistics. In the warm-up
    it is exact, and the statistics are those of the step. The paper centers the weights of the
    preceding layer instead of the activations; this package, as in UN's comparison, changes no other layer.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        window (int): gradient statistics that are averaged. Defaults to 16, the authors' value.
        alpha, warmup_iters, eps: as :class:`UN`'s, with its defaults. (MABN's own paper has an `alpha` of
            0.98, for longer runs: the average then lags by 50 steps.)
    """

    def __init__(self, num_features: int, window: int = 16, alpha: float = 0.9, warmup_iters: int | float = 4000,
                 eps: float = 1e-5):
        super().__init__(
            num_features, forward_average='ema', backward_momentum=False, outlier_filter=False, window=window,
            alpha=alpha, warmup_iters=warmup_iters, eps=eps)
