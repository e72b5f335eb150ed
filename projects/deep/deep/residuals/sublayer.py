"""The parts of a sublayer F that a residual scheme uses: its linear layers by role, and its stochastic depth."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from mmcv.cnn.bricks.drop import DropPath
from mmcv.cnn.bricks.transformer import FFN
from mmpretrain.models.utils import MultiheadAttention, ShiftWindowMSA, SwiGLUFFN
from torch import Tensor, nn

from mmunorm.norms import Norm

OUTER_ROLES = ('v', 'out', 'fc1', 'fc2')
ROLES = ('q', 'k', *OUTER_ROLES)


def call_norm(norm: nn.Module, x: Tensor, pad_mask: Tensor | None) -> Tensor:
    """`norm(x)`, with the pad mask for norms of this package: the others have no statistics over tokens."""
    return norm(x, pad_mask) if pad_mask is not None and isinstance(norm, Norm) else norm(x)


class PreLinear(nn.Sequential):
    """The last linear layer of F, `linear`, after modules with other names that process its input `(..., C)`."""

    def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        """From `(..., C)` to the linear layer's output; `pad_mask` `(...)` is True where a token is padding."""
        for part in self:
            x = call_norm(part, x, pad_mask)
        return x


class MovedDropPath(nn.Identity):
    """An identity in place of F's stochastic depth, which moved to the connection; it shares its `drop_prob`."""

    def __init__(self, moved: nn.Module):
        super().__init__()
        self._moved = (moved, )  # in a tuple: it is a child of the connection

    @property
    def drop_prob(self) -> float:
        """That of the connection's stochastic depth."""
        return self._moved[0].drop_prob

    @drop_prob.setter
    def drop_prob(self, value: float) -> None:
        self._moved[0].drop_prob = value


@dataclass(frozen=True)
class Sublayer:
    """An attention or a feed-forward network in a residual stream."""
    module: nn.Module  # F itself
    first: nn.Module  # the first linear layer
    first_roles: tuple[str, ...]  # the roles of its rows, in equal parts
    parent: nn.Module  # the parent of the last linear layer
    last_name: str  # its name in the parent
    last_role: str
    drop_owner: nn.Module  # the parent of the stochastic depth of F's output
    drop_name: str  # its name in that parent
    memory: nn.Module | None = None  # of a cross-attention, the linear layer that projects another stream to k and v

    @property
    def last_module(self) -> nn.Module:
        """The consumer of the heads' outputs or the activation: the last linear layer, or its :class:`PreLinear`."""
        return getattr(self.parent, self.last_name)

    @property
    def last(self) -> nn.Module:
        """The last linear layer."""
        module = self.last_module
        return module.linear if isinstance(module, PreLinear) else module

    @property
    def is_plain_after_last(self) -> bool:
        """Whether F ends with that layer, except for dropout: without mmpretrain's own LayerScale."""
        return all(isinstance(getattr(self.module, name, None), (nn.Identity, type(None)))
                   for name in ('gamma1', 'gamma2'))

    def weights(self) -> dict[str, Tensor]:
        """The weights `(out, in)` by role, as views that may be written to; a fused q, k, v is three of them."""
        rows = self.first.weight.detach().chunk(len(self.first_roles))
        weights = {**dict(zip(self.first_roles, rows, strict=True)), self.last_role: self.last.weight.detach()}
        if self.memory is not None:
            weights['k'], weights['v'] = self.memory.weight.detach().chunk(2)
        return weights

    def biases(self) -> list[Tensor]:
        """The biases of these layers, as views that may be written to."""
        layers = (self.first, self.last, *filter(None, [self.memory]))
        return [layer.bias.detach() for layer in layers if layer.bias is not None]

    def insert_before_last(self, name: str, module: nn.Module) -> None:
        """Inserts `module` before the last linear layer, and before other modules that were inserted there."""
        last = self.last_module
        parts = dict(last.named_children()) if isinstance(last, PreLinear) else dict(linear=last)
        setattr(self.parent, self.last_name, PreLinear(OrderedDict({name: module, **parts})))

    def detach_drop_path(self) -> nn.Module:
        """Removes the stochastic depth from F, and returns it."""
        drop = getattr(self.drop_owner, self.drop_name)
        replacement = nn.Identity()
        if isinstance(drop, DropPath):
            drop.drop_prob = float(drop.drop_prob)  # torch.compile breaks the graph at a NumPy number
            replacement = MovedDropPath(drop)
        setattr(self.drop_owner, self.drop_name, replacement)
        return drop


def describe(module: nn.Module) -> Sublayer:
    """The parts of an attention or a feed-forward network: of mmpretrain, of mmcv, or with its own `describe()`.

    Any other module is a TypeError.
    """
    if callable(getattr(module, 'describe', None)):
        return module.describe()
    if isinstance(module, (MultiheadAttention, ShiftWindowMSA)):
        is_window = isinstance(module, ShiftWindowMSA)
        inner = module.w_msa if is_window else module
        return Sublayer(module, inner.qkv, ('q', 'k', 'v'), inner, 'proj', 'out', module,
                        'drop' if is_window else 'out_drop')
    if isinstance(module, FFN):  # a dropout follows the last layer
        return Sublayer(module, module.layers[0][0], ('fc1', ), module.layers, str(len(module.layers) - 2), 'fc2',
                        module, 'dropout_layer')
    if isinstance(module, SwiGLUFFN):
        return Sublayer(module, module.w12, ('fc1', ), module, 'w3', 'fc2', module, 'dropout_layer')
    raise TypeError(f'a residual scheme knows MultiheadAttention, ShiftWindowMSA, FFN and SwiGLUFFN, '
                    f'got {type(module).__name__}')
