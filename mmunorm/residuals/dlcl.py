"""DLCL (Wang et al., ACL 2019, arXiv 1906.01787): each layer reads a learned mix of all outputs before it."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..norms.base import call_norm
from .base import RESIDUALS, Place
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
    needs_depth = True

    def __init__(self, place: Place):
        super().__init__(place)
        self.channels = place.channels
        if place.previous is not None and place.previous.channels != place.channels:
            raise ValueError(f'mixes the outputs of all layers, which need one width, got {place.previous.channels} '
                             f'and {place.channels} channels; take it for a model without stages')
        self.is_first = place.is_first
        self.is_end = place.is_last and place.layer == place.depth
        terms = place.layer if self.is_first else place.layer + 1
        if self.is_first or self.is_end:
            self.weight = nn.Parameter(torch.full((terms, ), 1 / terms))
            self.mix_norm = place.build_norm()
        # The normed outputs so far of the forward pass that is under way, shared by the connections of a model.
        self._history: list[Tensor] = [] if place.previous is None else place.previous._history

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor], norm: nn.Module,
                pad_mask: Tensor | None = None) -> Tensor:
        """As :meth:`Residual.forward`.

        Raises:
            RuntimeError: the layers before it have not been run.
        """
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
