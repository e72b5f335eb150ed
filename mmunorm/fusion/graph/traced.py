"""What a trace has seen, by name: which norms and layers give what is read where, and what forbids to fold them."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .labels import Labels, shrink


@dataclass(frozen=True)
class Origin:
    """Something whose channels have numbers: a norm's output, a layer's, or a parameter that is a vector."""
    name: str  # of the norm, of the layer's weight, or of the parameter
    kind: str  # 'norm', 'layer' or 'vector'
    channels: range


@dataclass(eq=False)
class TracedLayer:
    """A linear operator of the trace, known by its weight, or by some rows of a weight."""
    owner: str  # full name of the module that holds the weight
    weight: str  # full name of the weight
    tensor: str  # the first name of the same tensor
    rows: tuple[int, int]  # the first of its rows that are the operator's, and the end
    gives: Origin
    reads: list[int]  # number of what is read at each channel of its input, the same in each call
    bias: list[int] | None  # for each row the number of its bias, in the vectors that this is made of
    own: bool  # whether the owner's own forward has called it each time
    within: set[str]  # modules that fill padding, of those around each call
    problem: str = ''  # why it can take no norm up, half a sentence


@dataclass(eq=False)
class TracedNorm:
    """What a norm has read, over all its calls."""
    gives: Origin
    from_layers: bool = True  # whether all that it reads is the output of layers
    runs: int = 0
    why_not: str = ''


class Obstacle(NamedTuple):
    """Why the norm of a channel cannot go into what reads it, half a sentence after 'its output'."""
    why: str
    is_padding: bool = False  # whether it could if another token than zeros were padded
    inside: str = ''  # the module whose forward reads it, of those that are watched


@dataclass
class TracedModel:
    """All that a trace knows. Channels are numbers of one row for all norms, layers and vectors."""
    origins: list[Origin] = field(default_factory=list)
    layers: dict[tuple[str, int, int, str], TracedLayer] = field(default_factory=dict)  # by weight, rows and owner
    norms: dict[str, TracedNorm] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)  # parameters that something else reads, and what
    blocked: dict[int, list[Obstacle]] = field(default_factory=dict)  # channels that no norm can take, and why
    padded: dict[int, set[str | None]] = field(default_factory=dict)  # the modules that pad channels
    readers: dict[int, tuple[Origin, int]] = field(default_factory=dict)  # of layers' channels: norm and channel there

    @property
    def size(self) -> int:
        """How many channels have numbers."""
        return self.origins[-1].channels.stop if self.origins else 0

    def add(self, name: str, kind: str, channels: int) -> Origin:
        """A new origin."""
        self.origins.append(Origin(name, kind, range(self.size, self.size + channels)))
        return self.origins[-1]

    def origin_of(self, number: int) -> Origin:
        """Whose channel a number is."""
        return self.origins[bisect_right(self.origins, number, key=lambda origin: origin.channels.start) - 1]

    def numbers(self, labels: Labels) -> list[int]:
        """The different numbers in labels, in order."""
        seen = torch.zeros(self.size + 1, dtype=torch.bool)
        seen[shrink(labels).flatten().cpu()] = True  # NOTHING is the last
        return seen[:-1].nonzero().flatten().tolist()

    def block(self, labels: Labels | None, why: str, is_padding: bool = False, inside: str = '') -> None:
        """Something reads these channels that no norm can go into, or something other than the one norm after them."""
        for number in () if labels is None else self.numbers(labels):
            self._block(number, Obstacle(why, is_padding, inside))

    def _block(self, number: int, obstacle: Obstacle) -> None:
        known = self.blocked.setdefault(number, [])
        if obstacle not in known:
            known.append(obstacle)

    def why_blocked(self, numbers: Iterable[int]) -> str:
        """Why one of these channels is blocked, or ''."""
        return next((obstacle.why for obstacle in self.obstacles(numbers)), '')

    def obstacles(self, numbers: Iterable[int]) -> list[Obstacle]:
        """All that blocks these channels, in the order of the run."""
        return list(dict.fromkeys(obstacle for number in numbers for obstacle in self.blocked.get(number, ())))

    def note_padding(self, labels: Labels, module: str | None) -> None:
        """Channels are padded with zeros in a module; None for one that cannot fill it with something else."""
        for number in self.numbers(labels):
            self.padded.setdefault(number, set()).add(module)

    def note_norm(self, norm: TracedNorm, labels: Labels | None, axis: int) -> None:
        """A norm has read a tensor of these labels, whose dimension `axis` is its channels."""
        norm.runs += 1
        why, size = f'is read by the norm {norm.gives.name}', len(norm.gives.channels)
        if labels is None or bool((labels < 0).any()) or any(
                self.origin_of(number).kind != 'layer' for number in self.numbers(labels)):
            norm.from_layers = False
            self.block(labels, why)
            return
        labels = shrink(labels, keep=axis).movedim(axis, -1).cpu()
        for pair in (labels * size + torch.arange(size)).unique().tolist():
            number, channel = divmod(pair, size)
            if self.readers.setdefault(number, (norm.gives, channel)) != (norm.gives, channel):
                self._block(number, Obstacle(f'{why} and by another, or as several channels'))
