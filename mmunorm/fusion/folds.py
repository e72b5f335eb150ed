"""The data of a folding: what consumes a tensor, which layers a norm is folded into, and what folds together."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .norms import Affine
from .obstacles import Obstacle
from .padding import Fill

if TYPE_CHECKING:
    from .plan import FoldPlan

Pad = Callable[[nn.Module, Fill], nn.Module]


@dataclass(frozen=True)
class Use(Obstacle):
    """What consumes a channel: `part` is the function, layer or norm."""
    inside: str = ''  # the module whose forward consumes it
    norm: str = ''  # the norm that consumes it


@dataclass(frozen=True)
class Site:
    """A layer that a norm is folded into: a consumer of the norm, or with `after` a layer before it."""
    layer: str  # full name of the module that holds the weight
    after: bool = False
    weight: str = 'weight'  # its name in that module
    rows: tuple[int, int] | None = None  # the rows of the weight that are the layer's, [first, end); None for all
    # For each input channel of the layer (`after`: output channel), the norm's channel, or -1; None for the identity.
    channels: tuple[int, ...] | None = None
    # For each output channel of the layer, the vector that holds its bias and the index in it; empty for the bias of
    # the module, which is created if there is none.
    bias: tuple[tuple[str, int], ...] = ()

    @property
    def part(self) -> slice:
        """The layer's rows of the weight."""
        return slice(*self.rows or (None, ))


@dataclass
class Fold:
    """One norm: the layers it is folded into, or why it is kept. All names are full names."""
    norm: str
    kind: str  # class of the norm
    sites: list[Site] = field(default_factory=list)
    pads: list[tuple[str, Pad]] = field(default_factory=list)  # modules that pad its output with zeros
    is_padded: bool = False  # whether zeros of padding reach its layers; of a LayerNorm or RMSNorm
    joint: JointFold | None = None  # what it folds together with
    norms_after: list[str] = field(default_factory=list)  # other norms that consume it, in a joint fold
    copied: list[str] = field(default_factory=list)  # layers that get a copy of their shared weight
    obstacle: Obstacle | None = None
    beyond_float16: bool = False  # whether its padding token is too large for float16
    left: str = ''  # what stays of a LayerNorm or RMSNorm that is folded in part
    not_rotated: Obstacle | None = None  # why the residual stream that it reads is not rotated, if that was asked for

    @property
    def where(self) -> str:
        """Where the norm was folded, or why it was kept."""
        if self.obstacle:
            return str(self.obstacle)
        if not self.sites:
            return ', '.join(self.norms_after)
        layers = ', '.join(dict.fromkeys(site.layer for site in self.sites))
        filled = ' (padding filled, too large for float16)' if self.beyond_float16 else ' (padding filled)'
        note = filled if self.pads else ' (with a copy of its shared weight)' if self.copied else ''
        return ('back into ' if self.sites[0].after else '') + layers + note


class JointFold:
    """Norms that fold together or not at all, and what else changes in the model with them, or without any norm.

    A fold rule yields instances of subclasses, which override what they need; names are relative to the module of the
    rule. Like every fold, a joint fold is verified on a copy of the model, and left out if outputs differ.

    Attributes:
        norms: names of the norms, which are kept unless all of them fold.
        requires: names of norms that must fold, too, but also fold alone.
        changed: names of other modules whose outputs change.
        copies: names of layers that may get a copy of their shared weight, so that a norm folds into one of its uses.
        obstacle: why it cannot be done, or None; set while the plan is checked and verified.
    """

    def __init__(self, norms: tuple[str, ...] = (), requires: tuple[str, ...] = (), changed: tuple[str, ...] = (),
                 copies: tuple[str, ...] = ()):
        self.norms, self.requires, self.changed, self.copies = norms, requires, changed, copies
        self.obstacle: Obstacle | None = None

    def within(self, prefix: str) -> JointFold:
        """The same with full names, for a module with the name `prefix`."""
        return JointFold(*(tuple(join(prefix, name) for name in names)
                           for names in (self.norms, self.requires, self.changed, self.copies)))

    def allows(self, norm: str, use: Use) -> bool:
        """Whether the joint fold takes care of a consumer of one of its norms."""
        return False

    def check(self, plan: FoldPlan) -> Obstacle | None:
        """Why it cannot be done, or None. `plan.folds` has the layers that consume each norm."""
        return None

    def affines(self, plan: FoldPlan) -> dict[str, Affine]:
        """The scale and shift to fold `norms` and `requires` with, by name, where it is not their own."""
        return {}

    def apply(self, model: nn.Module, plan: FoldPlan) -> None:
        """Changes a model, the plan's or a copy of it, in place. Its norms are folded already."""


@dataclass
class Writer:
    """What writes to a residual stream: 'layer', 'norm', or 'token' for a parameter, buffer or embedding."""
    kind: str
    name: str  # of the module that holds the weight, of the norm, or of the tensor
    site: Site | None = None  # of a layer
    scale: str = ''  # the parameter of a LayerScale that multiplies a layer's output
    axis: int = 0  # of a token: the dimension of its channels


@dataclass
class Reader:
    """A norm, or a linear layer without a norm before it, that reads a residual stream."""
    name: str
    is_norm: bool
    channels: tuple[int, ...]  # that it reads, in order; each several times if it reads several tokens side by side
    site: Site | None = None  # of a layer


@dataclass
class Stream:
    """A residual stream of `width` channels: what writes and reads it, and why its basis cannot change, or None."""
    width: int
    writers: list[Writer] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    obstacle: Obstacle | None = None

    @property
    def norms(self) -> list[str]:
        """The names of the norms that read it."""
        return [reader.name for reader in self.readers if reader.is_norm]


@dataclass(frozen=True)
class StreamBasis:
    """The basis of a residual stream that was rotated.

    Attributes:
        norms: names of the norms that read the stream.
        basis: Q, `(C, C)` float64; `Q 1 = 1`.
        is_centered: whether the mean of each token was subtracted.
    """
    norms: list[str]
    basis: Tensor
    is_centered: bool

    def restore(self, tokens: Tensor) -> Tensor:
        """Tokens `(..., C)` of the folded stream in the basis of the original model, without their mean if it is
        centered."""
        return tokens @ self.basis.to(tokens)


def join(prefix: str, name: str | None) -> str:
    """The full name of a part of the module `prefix`."""
    return '.'.join(filter(None, (prefix, name)))


def ancestors(name: str) -> tuple[str, ...]:
    """The modules that a part of a model is in, from the outermost, which is ''."""
    return ('', *accumulate(name.split('.'), '{}.{}'.format))[:-1]
