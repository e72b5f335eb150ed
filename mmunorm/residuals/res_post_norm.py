"""ResPostNorm of Swin V2 (arXiv 2111.09883): the norm stands at the end of the branch."""
from torch import nn

from .base import RESIDUALS, Residual, ResidualError
from .sublayer import Sublayer


@RESIDUALS.register_module()
class ResPostNorm(Residual):
    """`x' = x + LN(F(x))`; gamma starts at 0, so that the layers do. The rest starts as `init_cfg` says."""
    norm_at = 'mid'

    def initialize(self, sublayer: Sublayer, norm: nn.Module) -> None:
        """Sets gamma of the layer's norm to 0.

        Raises:
            ResidualError: the norm has no `weight`.
        """
        if getattr(norm, 'weight', None) is None:
            raise ResidualError(f'norm_cfg: ResPostNorm starts with a scale of 0 in each norm, and '
                                f"{type(norm).__name__} has no scale; take a norm with one, such as dict(type='UN')")
        nn.init.zeros_(norm.weight)
