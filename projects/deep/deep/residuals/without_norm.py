"""Schemes for models without a norm."""
from __future__ import annotations

import torch
from torch import nn

from .base import RESIDUALS, Residual, Scale, StackPosition
from .sublayer import OUTER_ROLES


@RESIDUALS.register_module()
class ScaledResidual(Residual):
    """`x' = (x + F(x)) / sqrt(2)`, which keeps the second moment (Su, kexue 8620). `init_cfg` sets the weights."""
    without_norm = True

    def scales(self) -> tuple[Scale, Scale]:
        return 0.5**0.5, 0.5**0.5


@RESIDUALS.register_module()
class ReZero(Residual):
    """ReZero (arXiv 2003.04887): `x' = x + g F(x)`; the sublayers of a layer share `gain` `()`, which starts at 0."""
    without_norm = True

    def __init__(self, position: StackPosition):
        super().__init__(position)
        if position.is_first:
            self.gain = nn.Parameter(torch.zeros(()))
        # In a tuple, so that it is no child: the parameter has one name, and an optimizer gets it once.
        self._owner = (self, ) if position.is_first else position.previous._owner

    def scales(self) -> tuple[Scale, Scale]:
        return None, self._owner[0].gain


@RESIDUALS.register_module()
class TFixup(Residual):
    """T-Fixup (Huang et al., ICML 2020): `x' = x + F(x)`; small weights replace norms and the learning rate warm-up.

    Those of v, out, fc1 and fc2 start as Xavier's times `0.67 N^(-1/4)` for one stack of N layers and in an encoder,
    times `(9 M)^(-1/4)` in a decoder of M layers. Those of the patch embedding start as Xavier's times
    `(9 N)^(-1/4)`, those of a token embedding with the deviation `C^(-1/2)` times that.
    """
    without_norm = True

    def __init__(self, position: StackPosition):
        super().__init__(position)
        self.embedding_gain = (9 * position.depth)**-0.25
        self.gains = dict.fromkeys(
            OUTER_ROLES, self.embedding_gain if position.in_decoder else 0.67 * position.depth**-0.25)

    def initialize_embedding(self, embedding: nn.Module) -> None:
        if isinstance(embedding, nn.Embedding):
            nn.init.normal_(embedding.weight, std=embedding.embedding_dim**-0.5 * self.embedding_gain)
            return
        nn.init.xavier_normal_(embedding.weight.detach().flatten(1), self.embedding_gain)
        if embedding.bias is not None:
            nn.init.zeros_(embedding.bias)


@RESIDUALS.register_module()
class RFixup(Residual):
    """Fixup (arXiv 1901.09321), R-Fixup in tables with T-Fixup: `x' = x + g F(x)`; no norm.

    Each sublayer's parameter `gain` `()` starts at 1. The weights of out and fc2 start at 0, those of q, k and v as
    Xavier's times `L^(-1/6)` and those of fc1 times `L^(-1/2)`. L counts sublayers: `2 N` for one stack of N layers,
    `2 N + 3 M` with a decoder of M layers. The paper's scalar biases are part of those of the linear layers. Its
    classifier, which also starts at 0, is not part of the backbone.
    """
    without_norm = True

    def __init__(self, position: StackPosition):
        super().__init__(position)
        self.gain = nn.Parameter(torch.ones(()))
        encoder, decoder = position.stacks or (position.depth, 0)
        sublayers = 2 * encoder + 3 * decoder
        self.gains = dict(dict.fromkeys('qkv', sublayers**(-1 / 6)), out=0., fc1=sublayers**(-1 / 2), fc2=0.)

    def scales(self) -> tuple[Scale, Scale]:
        return None, self.gain
