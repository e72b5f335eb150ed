"""DLCL (Wang et al., ACL 2019, arXiv 1906.01787): each layer reads a learned mix of all outputs before it."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..norms.base import call_norm
from .base import RESIDUALS, StackPosition
from .pre_norm import PreNorm


@RESIDUALS.register_module()
class DLCL(PreNorm):
    """PreNorm whose layer l reads `sum over k < l of w_k LN_k(y_k)`: of the embedding y_0 and of the layers before.

    What leaves the last layer is such a mix as well. The first connection of layer l holds the weights for it, the
    parameter `weight` w `(l,)`, which starts as a mean, and `mix_norm`, the norm of `y_(l-1)`; the last connection
    of the model holds the same for what leaves it. Layers are run in their order, once each, so that activation
    checkpointing cannot be used.

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
        # The normed outputs so far of the forward pass that is under way, shared by the connections of a model.
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
