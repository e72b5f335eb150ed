"""Schemes with norms in the branch: the stream is not normalized between layers."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .base import RESIDUALS, Residual, ResidualError, Scale, StackPosition
from .sublayer import OUTER_ROLES, Sublayer, call_norm


@RESIDUALS.register_module()
class PreNorm(Residual):
    """`x' = x + F(LN(x))`, and a norm after the last layer, as in ViT (arXiv 2010.11929) and every stock backbone.

    Initial weights follow `init_cfg`.
    """


@RESIDUALS.register_module()
class ResPostNorm(Residual):
    """`x' = x + LN(F(x))` of Swin V2 (arXiv 2111.09883); gamma starts at 0, so each layer starts as the identity.

    Other initial weights follow `init_cfg`.
    """
    norm_at = 'mid'

    def initialize(self, sublayer: Sublayer, norm: nn.Module) -> None:
        """Sets gamma of the layer's norm to 0; a ResidualError if it has no `weight`."""
        if getattr(norm, 'weight', None) is None:
            raise ResidualError(f'norm_cfg: ResPostNorm starts with a scale of 0 in each norm, and '
                                f"{type(norm).__name__} has no scale; take a norm with one, such as dict(type='UN')")
        nn.init.zeros_(norm.weight)


@RESIDUALS.register_module()
class PeriNorm(PreNorm):
    """`x' = x + LN(F(LN(x)))`, norms at both ends of the branch (Peri-LN, arXiv 2502.02732)."""

    def __init__(self, position: StackPosition):
        super().__init__(position)
        self.norm = position.build_norm()


@RESIDUALS.register_module()
class SkipInit(PreNorm):
    """`x' = x + g F(LN(x))` (De and Smith, arXiv 2002.10444); each sublayer's parameter `gain` `()` starts at 0."""

    def __init__(self, position: StackPosition):
        super().__init__(position)
        self.gain = nn.Parameter(torch.zeros(()))

    def scales(self) -> tuple[Scale, Scale]:
        return None, self.gain


@RESIDUALS.register_module()
class LayerScale(PreNorm):
    """LayerScale of CaiT (arXiv 2103.17239): `x' = x + diag(l) F(LN(x))` with the parameter `weight` l `(C,)`.

    Args:
        init_value (float, optional): initial value of l. Defaults to None, CaiT's choice by the depth of the model:
            0.1 to depth 18, 1e-5 to 24, 1e-6 above.
    """

    def __init__(self, position: StackPosition, init_value: float | None = None):
        super().__init__(position)
        if init_value is None:
            init_value = 0.1 if position.depth <= 18 else 1e-5 if position.depth <= 24 else 1e-6
        elif isinstance(init_value, bool) or not isinstance(init_value, (int, float)):
            raise ValueError(f'init_value must be a number, or None for CaiT\'s choice, got {init_value!r}')
        self.weight = nn.Parameter(torch.full((position.channels, ), float(init_value)))

    def scales(self) -> tuple[Scale, Scale]:
        return None, self.weight


@RESIDUALS.register_module()
class SubLN(PreNorm):
    """SubLN of Magneto (arXiv 2210.06423): PreNorm with an additional norm in F, before the output projection or fc2.

    The weights of v, out, fc1 and fc2 start as Xavier's times `sqrt(ln(2 N))` for one stack of N layers. With M layers
    in a decoder it is `sqrt(ln(3 M) ln(2 N) / 3)` in the encoder and `sqrt(ln(3 M))` in the decoder.
    """

    def __init__(self, position: StackPosition):
        super().__init__(position)
        sublayer = position.sublayer
        sublayer.insert_before_last('norm', position.build_norm(sublayer.last.in_features))
        if position.stacks is None:
            square = math.log(2 * position.depth)
        else:
            n, m = position.stacks
            square = math.log(3 * m) * (1 if position.in_decoder else math.log(2 * n) / 3)
        self.gains = dict.fromkeys(OUTER_ROLES, square**0.5)


class HeadScale(nn.Module):
    """Scales the output of each attention head by a learned number: `weight` `(heads,)`, which starts at 1."""
    decays_like_norm = True

    def __init__(self, num_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads))

    def forward(self, x: Tensor) -> Tensor:
        """From `(..., heads * d)` to the same shape."""
        return (x.unflatten(-1, (len(self.weight), -1)) * self.weight.unsqueeze(-1)).flatten(-2)


@RESIDUALS.register_module()
class NormFormer(PreNorm):
    """NormFormer (arXiv 2110.09456): `x' = x + LN(attention(LN(x)))` with scaled heads, and `x' = x + FFN(LN(x))`
    with a norm before fc2."""

    def __init__(self, position: StackPosition):
        super().__init__(position)
        sublayer = position.sublayer
        if sublayer.last_role == 'out':  # an attention
            self.norm = position.build_norm()
            sublayer.insert_before_last('scale', HeadScale(sublayer.parent.num_heads))
        else:
            sublayer.insert_before_last('norm', position.build_norm(sublayer.last.in_features))


@RESIDUALS.register_module()
class DLCL(PreNorm):
    """DLCL (Wang et al., arXiv 1906.01787): PreNorm whose layer l reads `sum over k < l of w_k LN_k(y_k)`.

    y_0 is the embedding, the others are the outputs of earlier layers. The output of the model is such a mix, too. The
    first connection of layer l holds its weights, the parameter `weight` w `(l,)`, which starts as a mean, and
    `mix_norm`, the norm of `y_(l-1)`; the last connection of the model holds those of the output. Layers must run in
    order, once each, so activation checkpointing cannot be used.

    Raises:
        ValueError: the layers differ in width, as those of a Swin do.
    """

    def __init__(self, position: StackPosition):
        super().__init__(position)
        self.channels = position.channels
        if position.previous is not None and position.previous.channels != position.channels:
            raise ValueError(f'mixes the outputs of all layers, which need one width, got {position.previous.channels} '
                             f'and {position.channels} channels; take it for a model without stages')
        self.is_first = position.is_first
        self.is_end = position.is_last and position.layer == position.depth
        terms = position.layer if self.is_first else position.layer + 1
        if self.is_first or self.is_end:
            self.weight = nn.Parameter(torch.full((terms, ), 1 / terms))
            self.mix_norm = position.build_norm()
        # The normed outputs of the current forward pass, shared by the connections of a model.
        self._history: list[Tensor] = [] if position.previous is None else position.previous._history

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor], norm: nn.Module,
                pad_mask: Tensor | None = None) -> Tensor:
        """As :meth:`Residual.forward`; a RuntimeError if the layers before it have not been run."""
        x = super().forward(self._mix(x, pad_mask) if self.is_first else x, branch, norm, pad_mask)
        if self.is_end:
            x = self._mix(x, pad_mask)
            self._history.clear()  # a model with a graph in it cannot be copied
        return x

    def _mix(self, x: Tensor, pad_mask: Tensor | None) -> Tensor:
        if len(self.weight) == 1:
            self._history.clear()
        self._history.append(call_norm(self.mix_norm, x, pad_mask))
        if len(self._history) != len(self.weight):
            raise RuntimeError(f'DLCL: layers must be run in their order, once each and without activation '
                               f'checkpointing; {len(self.weight)} outputs are mixed here, and there are '
                               f'{len(self._history)}')
        mixed = self.weight[0] * self._history[0]
        for weight, output in zip(self.weight[1:], self._history[1:], strict=True):
            mixed = torch.addcmul(mixed, output, weight)
        return mixed
