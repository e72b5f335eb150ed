"""SubLN of Magneto (arXiv 2210.06423): PreNorm with one more norm inside each sublayer."""
from __future__ import annotations

import math

from .base import RESIDUALS, Place
from .pre_norm import PreNorm


@RESIDUALS.register_module()
class SubLN(PreNorm):
    """`x' = x + F(LN(x))` with another norm in F, in front of the output projection or of fc2.

    The weights of v, out, fc1 and fc2 start as Xavier's times `sqrt(ln(2 N))` for one stack of N layers. With M layers
    in a decoder it is `sqrt(ln(3 M) ln(2 N) / 3)` in the encoder and `sqrt(ln(3 M))` in the decoder.

    Args:
        place (Place): where the connection stands.

    Raises:
        ValueError: the depth of the model is not known.
    """
    needs_depth = True

    def __init__(self, place: Place):
        super().__init__(place)
        place.sublayer.put_before_last('norm', place.build_norm(place.sublayer.last.in_features))
        self.gain = _gain(place)

    def gains(self) -> dict[str, float]:
        return dict.fromkeys(('v', 'out', 'fc1', 'fc2'), self.gain)

    def extra_repr(self) -> str:
        return f'depth={self.depth}'


def _gain(place: Place) -> float:
    if place.stacks is None:
        return math.log(2 * place.depth)**0.5
    n, m = place.stacks
    return (math.log(3 * m) * (1 if place.in_decoder else math.log(2 * n) / 3))**0.5
