"""SubLN of Magneto (arXiv 2210.06423): PreNorm with one more norm inside each sublayer."""
from __future__ import annotations

import math

from .base import RESIDUALS, Place
from .pre_norm import PreNorm


@RESIDUALS.register_module()
class SubLN(PreNorm):
    """`x' = x + F(LN(x))` with another norm in F, before the output projection or fc2.

    The weights of v, out, fc1 and fc2 start as Xavier's times `sqrt(ln(2 N))` for one stack of N layers. With M layers
    in a decoder it is `sqrt(ln(3 M) ln(2 N) / 3)` in the encoder and `sqrt(ln(3 M))` in the decoder.
    """
    needs_depth = True

    def __init__(self, place: Place):
        super().__init__(place)
        place.sublayer.put_before_last('norm', place.build_norm(place.sublayer.last.in_features))
        if place.stacks is None:
            self.gain = math.log(2 * place.depth)**0.5
        else:
            n, m = place.stacks
            self.gain = (math.log(3 * m) * (1 if place.in_decoder else math.log(2 * n) / 3))**0.5

    def gains(self) -> dict[str, float]:
        return dict.fromkeys(('v', 'out', 'fc1', 'fc2'), self.gain)
