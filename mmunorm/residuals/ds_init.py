"""DS-Init (arXiv 1908.11365): PostNorm whose deeper layers start with smaller weights."""
from __future__ import annotations

from .base import RESIDUALS, Place
from .post_norm import PostNorm
from .sublayer import ROLES


@RESIDUALS.register_module()
class DSInit(PostNorm):
    """`x' = LN(x + F(x))`; the weights of layer l, from 1, start as Xavier's times `l^(-1/2)`."""

    def __init__(self, place: Place):
        super().__init__(place)
        self.layer = place.layer

    def gains(self) -> dict[str, float]:
        return dict.fromkeys(ROLES, self.layer**-0.5)

    def extra_repr(self) -> str:
        return f'layer={self.layer}'
