"""DeepNorm (arXiv 2203.00555): PostNorm with a heavier stream and lighter weights."""
from __future__ import annotations

from .base import RESIDUALS, Place, Scale
from .post_norm import PostNorm


@RESIDUALS.register_module()
class DeepNorm(PostNorm):
    """`x' = LN(a x + F(x))`; the weights of v, out, fc1 and fc2 start as Xavier's times b, of q and k as Xavier's.

    For one stack of N layers `a = (2 N)^(1/4)` and `b = (8 N)^(-1/4)`. With N layers in an encoder and M in a decoder
    `a = 0.81 (N^4 M)^(1/16)` and `b = 0.87 (N^4 M)^(-1/16)` there, `a = (3 M)^(1/4)` and `b = (12 M)^(-1/4)` here.

    Args:
        place (Place): where the connection stands.

    Raises:
        ValueError: the depth of the model is not known.
    """
    needs_depth = True

    def __init__(self, place: Place):
        super().__init__(place)
        self.alpha, self.beta = _factors(place)

    def scales(self) -> tuple[Scale, Scale]:
        return self.alpha, None

    def gains(self) -> dict[str, float]:
        return dict.fromkeys(('v', 'out', 'fc1', 'fc2'), self.beta)

    def extra_repr(self) -> str:
        return f'depth={self.depth}'


def _factors(place: Place) -> tuple[float, float]:
    """a and b of the stack that a connection stands in."""
    if place.stacks is None:
        return (2 * place.depth)**0.25, (8 * place.depth)**-0.25
    n, m = place.stacks
    if place.in_decoder:
        return (3 * m)**0.25, (12 * m)**-0.25
    return 0.81 * (n**4 * m)**0.0625, 0.87 * (n**4 * m)**-0.0625
