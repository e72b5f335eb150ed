"""ScaledResidual (Su, kexue 8620): a sum that keeps the second moment."""
from __future__ import annotations

from .base import RESIDUALS, Scale
from .pre_norm import PreNorm


@RESIDUALS.register_module()
class ScaledResidual(PreNorm):
    """`x' = (x + F(x)) / sqrt(2)`, for models without a norm. Weights start as `init_cfg` says."""
    without_norm = True

    def scales(self) -> tuple[Scale, Scale]:
        return 0.5**0.5, 0.5**0.5
