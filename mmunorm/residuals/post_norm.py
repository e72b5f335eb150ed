"""Schemes that normalize the stream after each sum: the norm stands outside of the branch."""
from __future__ import annotations

from .base import RESIDUALS, Residual, Scale, StackPosition
from .sublayer import OUTER_ROLES, ROLES


@RESIDUALS.register_module()
class PostNorm(Residual):
    """`x' = LN(x + F(x))`, of the first Transformer (arXiv 1706.03762). Weights start as Xavier's.

    The stream needs no norm after the last layer.
    """
    norm_at = 'post'
    final_norm = False
    gains = {}


@RESIDUALS.register_module()
class DSInit(PostNorm):
    """DS-Init (arXiv 1908.11365): PostNorm; the weights of layer l, from 1, start as Xavier's times `l^(-1/2)`."""

    def __init__(self, position: StackPosition):
        super().__init__(position)
        self.gains = dict.fromkeys(ROLES, position.layer**-0.5)


@RESIDUALS.register_module()
class DeepNorm(PostNorm):
    """DeepNorm (arXiv 2203.00555): `x' = LN(a x + F(x))`, a heavier stream and lighter weights.

    Those of v, out, fc1 and fc2 start as Xavier's times b, those of q and k as Xavier's. For one stack of N layers
    `a = (2 N)^(1/4)` and `b = (8 N)^(-1/4)`. With N layers in an encoder and M in a decoder `a = 0.81 (N^4 M)^(1/16)`
    and `b = 0.87 (N^4 M)^(-1/16)` in the encoder, `a = (3 M)^(1/4)` and `b = (12 M)^(-1/4)` in the decoder.
    """

    def __init__(self, position: StackPosition):
        super().__init__(position)
        if position.stacks is None:
            self.alpha, beta = (2 * position.depth)**0.25, (8 * position.depth)**-0.25
        else:
            n, m = position.stacks
            if position.in_decoder:
                self.alpha, beta = (3 * m)**0.25, (12 * m)**-0.25
            else:
                self.alpha, beta = 0.81 * (n**4 * m)**0.0625, 0.87 * (n**4 * m)**-0.0625
        self.gains = dict.fromkeys(OUTER_ROLES, beta)

    def scales(self) -> tuple[Scale, Scale]:
        return self.alpha, None
