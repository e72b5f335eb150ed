"""The result of a trace: norms and layers, the consumers of their outputs, and what prevents folding, by name."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .labels import Labels, shrink


@dataclass(frozen=True)
class Origin:
    """Something whose channels are numbered: the output of a norm or layer, or a parameter that is a vector."""
    name: str  # of the norm, of the layer's weight, or of the parameter
    kind: str  # 'norm', 'layer' or 'vector'
    channels: range


@dataclass(eq=False)
class TracedLayer:
    """A linear operator of the trace, identified by its weight, or by some rows of a weight."""
    owner: str  # full name of the module that holds the weight
    weight: str  # full name of the weight
    tensor: str  # the first name of the same tensor
    rows: tuple[int, int]  # the rows of the weight that are the operator's, [first, end)
    gives: Origin
    reads: list[int]  # the number at each channel of its input, the same in each call
    bias: list[int] | None  # for each row the number of its bias, in the vectors that the bias consists of
    own: bool  # whether each call was by the owner's own forward
    within: set[str]  # the modules around each call that can fill padding
    problem: str = ''  # why no norm can be folded into it, as half a sentence


@dataclass(eq=False)
class TracedNorm:
    """The inputs of a norm over all its calls."""
    gives: Origin
    from_layers: bool = True  # whether its inputs are only outputs of layers
    runs: int = 0
    why_not: str = ''


class Obstacle(NamedTuple):
    """Why the norm of a channel cannot be folded into its consumer, as half a sentence after 'its output'."""
    why: str
    is_padding: bool = False  # whether it could be if the padding were not zeros
    inside: str = ''  # the watched module whose forward consumes it


@dataclass
class TracedModel:
    """The result of a trace. The channels of all norms, layers and vectors are numbered consecutively."""
    origins: list[Origin] = field(default_factory=list)
    layers: dict[tuple[str, int, int, str], TracedLayer] = field(default_factory=dict)  # by weight, rows and owner
    norms: dict[str, TracedNorm] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)  # parameters with other consumers, and which
    blocked: dict[int, list[Obstacle]] = field(default_factory=dict)  # channels whose norm cannot fold, and why
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
        """The origin of a number."""
        return self.origins[bisect_right(self.origins, number, key=lambda origin: origin.channels.start) - 1]

    def numbers(self, labels: Labels) -> list[int]:
        """The distinct numbers in labels, in order."""
        seen = torch.zeros(self.size + 1, dtype=torch.bool)
        seen[shrink(labels).flatten().cpu()] = True  # NOTHING is the last
        return seen[:-1].nonzero().flatten().tolist()

    def block(self, labels: Labels | None, why: str, is_padding: bool = False, inside: str = '') -> None:
        """Records a consumer of these channels that prevents folding: neither a layer nor the one norm after them."""
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
        """All obstacles of these channels, in the order of the run."""
        return list(dict.fromkeys(obstacle for number in numbers for obstacle in self.blocked.get(number, ())))

    def note_padding(self, labels: Labels, module: str | None) -> None:
        """Records that channels are padded with zeros in a module; None for one that cannot pad with other values."""
        for number in self.numbers(labels):
            self.padded.setdefault(number, set()).add(module)

    def note_norm(self, norm: TracedNorm, labels: Labels | None, axis: int) -> None:
        """Records a call of a norm on a tensor of these labels, whose dimension `axis` is its channels."""
        norm.runs += 1
        why, size = f'is consumed by the norm {norm.gives.name}', len(norm.gives.channels)
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
