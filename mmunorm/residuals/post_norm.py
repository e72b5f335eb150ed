"""PostNorm: `LN(x + F(x))`, the residual of the first Transformer (arXiv 1706.03762)."""
from __future__ import annotations

from .base import RESIDUALS, Residual


@RESIDUALS.register_module()
class PostNorm(Residual):
    """`x' = LN(x + F(x))`. Weights start as Xavier's. The stream needs no norm after the last layer."""
    norm_at = 'post'
    final_norm = False

    def gains(self) -> dict[str, float] | None:
        return {}
