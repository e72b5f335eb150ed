"""The base class and the registry of residual schemes."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from mmpretrain.models.utils import build_norm_layer
from torch import Tensor, nn

from mmunorm.registry import Registry
from mmunorm.utils import PreflightError

from .clock import UpdateClock
from .sublayer import Sublayer, call_norm

RESIDUALS = Registry('residual', locations=['projects.deep.deep.residuals'])
Scale = float | Tensor | None


class ResidualError(PreflightError, ValueError):
    """A `residual_cfg` is invalid, or does not fit the rest of the config."""


@dataclass(frozen=True)
class StackPosition:
    """The position of a residual connection in a model."""
    sublayer: Sublayer  # F
    channels: int  # of the stream, C
    norm_cfg: dict  # for additional norms of the scheme
    layer: int  # number of the layer in its stack, from 1
    depth: int  # layers of the stack, which is the whole model except in encoder-decoders
    stacks: tuple[int, int] | None  # layers of encoder and decoder, N and M; None for a model of one stack
    in_decoder: bool  # whether the stack is the decoder
    is_first: bool  # whether the sublayer is the first one of its layer
    is_last: bool
    clock: UpdateClock | None  # counts the updates of the model, if the scheme needs it
    previous: Residual | None  # the connection of the previous sublayer, None for the first of the stack

    def build_norm(self, channels: int | None = None) -> nn.Module:
        """An additional norm of the scheme; `channels` defaults to those of the stream."""
        return build_norm_layer(self.norm_cfg, self.channels if channels is None else channels)


class Residual(nn.Module):
    """The residual connection of one sublayer F: `x' = post(a x + b mid(F(pre(x))))`.

    A scheme defines by `norm_at` which of `pre`, `mid` and `post` is the layer's norm, by `scales` a and b, and by
    `gains` the initial weights of F. The layer's norm remains a child of the layer, as in checkpoints, and is an
    argument of `forward`; `norm` is an additional norm in `mid`, or the identity. F is always computed, also if its
    weight is 0: DistributedDataParallel waits for the gradient of each parameter. Stochastic depth moves from F to the
    connection, so that it drops everything a branch adds, `b mid(F(pre(x)))`.

    Args:
        position (StackPosition): the position of the connection, made by :func:`connect`; the same for every scheme.
    """
    decays_like_norm = True  # mmunorm's optimizer constructors apply `norm_decay_mult` to its parameters
    norm_at: ClassVar[str] = 'pre'
    without_norm: ClassVar[bool] = False  # whether the scheme makes norms unnecessary
    final_norm: ClassVar[bool] = True  # whether the stream has to be normalized after the last layer
    needs_clock: ClassVar[bool] = False
    # Factors of Xavier's deviation by role, 1 for other roles. None: initial weights follow `init_cfg`.
    gains: dict[str, float] | None = None

    def __init__(self, position: StackPosition):
        super().__init__()
        self.norm = nn.Identity()
        self.drop = position.sublayer.detach_drop_path()

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor], norm: nn.Module,
                pad_mask: Tensor | None = None) -> Tensor:
        """The stream after one sublayer, `(B, L, C)`.

        Args:
            x: the stream `(B, L, C)`, any floating dtype.
            branch: F, from `(B, L, C)` to the same shape.
            norm: the layer's norm for this sublayer.
            pad_mask: bool `(B, L)`, True where a token is padding, for the norms.
        """
        a, b = self.scales()
        y = branch(call_norm(norm, x, pad_mask) if self.norm_at == 'pre' else x)
        y = call_norm(self.norm, y, pad_mask)
        y = self.drop(call_norm(norm, y, pad_mask) if self.norm_at == 'mid' else y)
        x = _add(x if a is None else a * x, y, b)
        return call_norm(norm, x, pad_mask) if self.norm_at == 'post' else x

    def scales(self) -> tuple[Scale, Scale]:
        """a and b: numbers or tensors that broadcast to `(C,)`; None is 1."""
        return None, None

    def without_factors(self) -> Residual:
        """The connection after :func:`mmunorm.fuse_norms` has folded its factors."""
        return FoldedResidual(self)

    def initialize(self, sublayer: Sublayer, norm: nn.Module) -> None:
        """Initializes the weights of F and of the layer's norm as the scheme requires."""
        if self.gains is None:
            return
        for role, weight in sublayer.weights().items():
            nn.init.xavier_normal_(weight, self.gains.get(role, 1.))
        for bias in sublayer.biases():
            bias.zero_()

    def initialize_embedding(self, embedding: nn.Module) -> None:
        """Initializes the linear layer, convolution or embedding that the stream begins with."""


class FoldedResidual(Residual):
    """A connection whose factors are folded: the sum, and the norms that remain.

    Its buffer marks a folded checkpoint, as that of :class:`mmunorm.fusion.FoldedNorm` does.
    """

    def __init__(self, residual: Residual):
        nn.Module.__init__(self)
        self.norm_at = residual.norm_at
        self.norm = residual.norm
        self.drop = residual.drop
        # Before a norm it is folded with that norm; ScaledResidual's remains.
        self.stream_scale = None if self.norm_at == 'post' else residual.scales()[0]
        self.register_buffer('folded', torch.tensor(True))

    def scales(self) -> tuple[Scale, None]:
        return self.stream_scale, None


def _add(x: Tensor, y: Tensor, scale: Scale) -> Tensor:
    """`x + scale * y` in one operation."""
    if isinstance(scale, Tensor):
        return torch.addcmul(x, y, scale)
    return x + y if scale is None else torch.add(x, y, alpha=scale)
