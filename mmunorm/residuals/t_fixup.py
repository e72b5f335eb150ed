"""T-Fixup (Huang et al., ICML 2020): no norm and no warm-up of the rate, by small initial weights."""
from __future__ import annotations

from torch import nn

from .base import RESIDUALS, Place
from .pre_norm import PreNorm


@RESIDUALS.register_module()
class TFixup(PreNorm):
    """`x' = x + F(x)`, for models without a norm.

    The weights of v, out, fc1 and fc2 start as Xavier's times `0.67 N^(-1/4)` for one stack of N layers and in an
    encoder, times `(9 M)^(-1/4)` in a decoder of M layers. Those of the patch embedding start as Xavier's times
    `(9 N)^(-1/4)`, those of a token embedding with the deviation `C^(-1/2)` times that.
    """
    without_norm = True
    needs_depth = True

    def __init__(self, place: Place):
        super().__init__(place)
        self.factor = (9 * place.depth)**-0.25 if place.in_decoder else 0.67 * place.depth**-0.25

    def gains(self) -> dict[str, float]:
        return dict.fromkeys(('v', 'out', 'fc1', 'fc2'), self.factor)

    def initialize_embedding(self, embedding: nn.Module) -> None:
        if isinstance(embedding, nn.Embedding):
            nn.init.normal_(embedding.weight, std=embedding.embedding_dim**-0.5 * (9 * self.depth)**-0.25)
            return
        nn.init.xavier_normal_(embedding.weight.detach().flatten(1), (9 * self.depth)**-0.25)
        if embedding.bias is not None:
            nn.init.zeros_(embedding.bias)
