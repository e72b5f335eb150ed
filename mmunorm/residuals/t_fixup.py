"""T-Fixup (Huang et al., ICML 2020): no norm and no warm-up of the rate, by small initial weights."""
from __future__ import annotations

from torch import nn

from .base import RESIDUALS
from .pre_norm import PreNorm


@RESIDUALS.register_module()
class TFixup(PreNorm):
    """`x' = x + F(x)`, for models without a norm.

    The weights of v, out, fc1 and fc2 start as Xavier's times `0.67 N^(-1/4)` for one stack of N layers, those of
    the patch embedding as Xavier's times `(9 N)^(-1/4)`.

    Args:
        place (Place): where the connection stands.

    Raises:
        ValueError: the depth of the model is not known.
    """
    without_norm = True
    needs_depth = True

    def gains(self) -> dict[str, float]:
        return dict.fromkeys(('v', 'out', 'fc1', 'fc2'), 0.67 * self.depth**-0.25)

    def initialize_embedding(self, embedding: nn.Module) -> None:
        nn.init.xavier_normal_(embedding.weight.detach().flatten(1), (9 * self.depth)**-0.25)
        if embedding.bias is not None:
            nn.init.zeros_(embedding.bias)

    def extra_repr(self) -> str:
        return f'depth={self.depth}'
