"""The door for projects: what a fold rule can add to the plan of a model beyond norms that fold alone."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from .affine import Affine

if TYPE_CHECKING:
    from .plan import FoldPlan


class Consumer(NamedTuple):
    """What consumes the output of a norm and is no linear layer, so that the norm cannot be folded into it."""
    why: str  # half a sentence after 'its output'
    is_padding: bool = False  # whether it would be a linear layer if the padding were not zeros
    inside: str = ''  # the module whose forward consumes it
    norm: str = ''  # the norm that consumes it


class JointFold:
    """Norms that fold together or not at all, and what else changes in the model with them, or without any norm.

    A fold rule yields instances of subclasses, which override what they need; names are relative to the module of the
    rule. Like every fold, a joint fold is verified on a copy of the model, and left out if outputs differ.

    Attributes:
        norms: names of the norms, which are kept unless all of them fold.
        requires: names of norms that must fold, too, but also fold alone.
        changed: names of other modules whose outputs change.
        copies: names of layers that may get a copy of their shared weight, so that a norm folds into one of its uses.
        obstacle: why it cannot be done, or ''; set while the plan is checked and verified.
    """

    def __init__(self, norms: tuple[str, ...] = (), requires: tuple[str, ...] = (), changed: tuple[str, ...] = (),
                 copies: tuple[str, ...] = ()):
        self.norms, self.requires, self.changed, self.copies = norms, requires, changed, copies
        self.obstacle = ''

    def within(self, prefix: str) -> JointFold:
        """The same with full names, for a module with the name `prefix`."""
        return JointFold(*(tuple(join(prefix, name) for name in names)
                           for names in (self.norms, self.requires, self.changed, self.copies)))

    def allows(self, norm: str, consumer: Consumer) -> bool:
        """Whether the joint fold takes care of a consumer of one of its norms."""
        return False

    def check(self, plan: FoldPlan) -> str:
        """Why it cannot be done, as half a sentence, or ''. `plan.folds` has the layers that consume each norm."""
        return ''

    def affines(self, plan: FoldPlan) -> dict[str, Affine]:
        """The scale and shift to fold `norms` and `requires` with, by name, where it is not their own."""
        return {}

    def apply(self, model: nn.Module, plan: FoldPlan) -> None:
        """Changes a model, the plan's or a copy of it, in place. Its norms are folded already."""


def join(prefix: str, name: str) -> str:
    """The full name of a part of the module `prefix`."""
    return '.'.join(filter(None, (prefix, name)))
