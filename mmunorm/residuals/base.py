"""The one form of every residual scheme, and their registry."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..norms.base import call_norm
from ..registry import Registry
from ..utils import PreflightError
from .clock import UpdateClock
from .sublayer import Sublayer

RESIDUALS = Registry('residual', locations=['mmunorm.residuals'])
Scale = float | Tensor | None


class ResidualError(PreflightError, ValueError):
    """A `residual_cfg` cannot be used, or not with what stands beside it."""


@dataclass(frozen=True)
class Place:
    """Where a residual connection stands.

    Attributes:
        sublayer: F.
        channels: of the stream, C.
        norm_cfg: what a norm of the scheme's own is built from.
        layer: number of the layer in its stack, from 1.
        depth: layers of the stack, which is the whole model except in encoder-decoders; None if it is not known.
        stacks: layers of encoder and decoder, N and M; None for a model of one stack.
        in_decoder: whether the stack is the decoder.
        is_first: whether the sublayer is the first one of its layer.
        is_last: whether it is the last one.
        clock: counts the updates of the model, if its scheme asks for that.
        previous: the connection of the sublayer before, None for the stack's first.
    """
    sublayer: Sublayer
    channels: int
    norm_cfg: dict
    layer: int = 1
    depth: int | None = None
    stacks: tuple[int, int] | None = None
    in_decoder: bool = False
    is_first: bool = True
    is_last: bool = False
    clock: UpdateClock | None = None
    previous: Residual | None = None

    def build_norm(self, channels: int | None = None) -> nn.Module:
        """A norm of the scheme's own over so many channels, those of the stream if they are not named."""
        from mmpretrain.models.utils import build_norm_layer  # here: fuse_norms runs without it
        return build_norm_layer(self.norm_cfg, self.channels if channels is None else channels)


class Residual(nn.Module):
    """The residual connection of one sublayer F: `x' = post(a x + b mid(F(pre(x))))`.

    A scheme says by `norm_at` which of `pre`, `mid` and `post` is the layer's norm, by `scales` what a and b are, and
    by `gains` how F's weights start. The layer's norm belongs to the layer, under the name that checkpoints know, and
    is an argument of `forward`. F is always computed, also where its weight is 0: DistributedDataParallel waits for
    the gradient of each parameter. Stochastic depth is taken out of F, so that it drops all that a branch adds,
    `b mid(F(pre(x)))`.

    Args:
        place (Place): where the connection stands; of every scheme. :func:`connect` makes it.

    Attributes:
        norm: a norm of the scheme's own in `mid`, or the identity.

    Raises:
        ValueError: the scheme needs the depth of the model, and `place` does not know it.
    """
    norm_at: ClassVar[str] = 'pre'
    # Whether the scheme makes norms unnecessary.
    without_norm: ClassVar[bool] = False
    # Whether the stream has to be normalized after the last layer.
    final_norm: ClassVar[bool] = True
    needs_depth: ClassVar[bool] = False
    needs_clock: ClassVar[bool] = False

    def __init__(self, place: Place):
        super().__init__()
        if self.needs_depth and place.depth is None:
            raise ValueError('depth must be the number of layers of the whole model, got None')
        self.depth = place.depth
        self.norm = nn.Identity()
        self.drop = place.sublayer.take_drop()

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor], norm: nn.Module,
                pad_mask: Tensor | None = None) -> Tensor:
        """One sublayer.

        Args:
            x: the stream `(B, L, C)`, any floating dtype.
            branch: F, from `(B, L, C)` to the same shape.
            norm: the layer's norm for this sublayer.
            pad_mask: bool `(B, L)`, True where a token is padding, for the norms. Defaults to None.

        Returns:
            The stream after the sublayer, `(B, L, C)`.
        """
        a, b = self.scales()
        y = branch(call_norm(norm, x, pad_mask) if self.norm_at == 'pre' else x)
        y = call_norm(self.norm, y, pad_mask)
        y = self.drop(call_norm(norm, y, pad_mask) if self.norm_at == 'mid' else y)
        x = _add(x if a is None else a * x, y, b)
        return call_norm(norm, x, pad_mask) if self.norm_at == 'post' else x

    def extra_repr(self) -> str:
        return f'depth={self.depth}' if self.needs_depth else ''

    def scales(self) -> tuple[Scale, Scale]:
        """a and b: numbers or tensors that broadcast to `(C,)`; None is 1."""
        return None, None

    def gains(self) -> dict[str, float] | None:
        """Factors of Xavier's deviation by role; a role that is not named has 1. None: as `init_cfg` says."""
        return None

    def initialize(self, sublayer: Sublayer, norm: nn.Module) -> None:
        """Draws the initial weights of F, and sets those of the layer's norm, as the scheme has them."""
        gains = self.gains()
        if gains is None:
            return
        for role, weight in sublayer.weights().items():
            nn.init.xavier_normal_(weight, gains.get(role, 1.))
        for bias in sublayer.biases():
            bias.zero_()

    def initialize_embedding(self, embedding: nn.Module) -> None:
        """Draws the weights of the linear layer, convolution or embedding that the stream begins with."""


def _add(x: Tensor, y: Tensor, scale: Scale) -> Tensor:
    """`x + scale * y` in one operation."""
    if isinstance(scale, Tensor):
        return torch.addcmul(x, y, scale)
    return x + y if scale is None else torch.add(x, y, alpha=scale)
