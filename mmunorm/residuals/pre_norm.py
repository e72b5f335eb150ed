"""PreNorm: `x + F(LN(x))`, the residual of ViT (arXiv 2010.11929) and of every stock backbone here."""
from .base import RESIDUALS, Residual


@RESIDUALS.register_module()
class PreNorm(Residual):
    """`x' = x + F(LN(x))`, and a norm after the last layer. Weights start as `init_cfg` says."""
