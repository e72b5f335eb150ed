"""PeriNorm (Peri-LN, arXiv 2502.02732): norms at both ends of the branch."""
from .base import RESIDUALS, Place
from .pre_norm import PreNorm


@RESIDUALS.register_module()
class PeriNorm(PreNorm):
    """`x' = x + LN(F(LN(x)))`."""

    def __init__(self, place: Place):
        super().__init__(place)
        self.norm = place.build_norm()
