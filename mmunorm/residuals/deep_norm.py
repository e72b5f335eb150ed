"""DeepNorm (arXiv 2203.00555): PostNorm with a heavier stream and lighter weights."""
from __future__ import annotations

from .base import RESIDUALS, Place, Scale
from .post_norm import PostNorm


@RESIDUALS.register_module()
class DeepNorm(PostNorm):
    """`x' = LN(a x + F(x))`; the weights of v, out, fc1 and fc2 start as Xavier's times b, of q and k as Xavier's.

    For one stack of N layers `a = (2 N)^(1/4)` and `b = (8 N)^(-1/4)`. With N layers in an encoder and M in a decoder
    `a = 0.81 (N^4 M)^(1/16)` and `b = 0.87 (N^4 M)^(-1/16)` in the encoder, `a = (3 M)^(1/4)` and
    `b = (12 M)^(-1/4)` in the decoder.
    """
    needs_depth = True

    def __init__(self, place: Place):
        super().__init__(place)
        if place.stacks is None:
            self.alpha, self.beta = (2 * place.depth)**0.25, (8 * place.depth)**-0.25
            return
        n, m = place.stacks
        if place.in_decoder:
            self.alpha, self.beta = (3 * m)**0.25, (12 * m)**-0.25
        else:
            self.alpha, self.beta = 0.81 * (n**4 * m)**0.0625, 0.87 * (n**4 * m)**-0.0625

    def scales(self) -> tuple[Scale, Scale]:
        return self.alpha, None

    def gains(self) -> dict[str, float]:
        return dict.fromkeys(('v', 'out', 'fc1', 'fc2'), self.beta)
