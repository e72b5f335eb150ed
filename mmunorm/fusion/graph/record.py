"""What a trace has seen, by name: which norms and layers give what is read where, and what forbids to fold them."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .labels import NOTHING, Labels, shrink


@dataclass(eq=False)
class Origin:
    """Something whose channels have numbers: a norm's output, a layer's, or a parameter that is a vector."""
    name: str  # of the norm, of the layer's weight, or of the parameter
    kind: str  # 'norm', 'layer' or 'vector'
    start: int  # number of its first channel
    size: int

    def has(self, labels: Labels) -> Tensor:
        return (labels >= self.start) & (labels < self.start + self.size)


@dataclass(eq=False)
class Layer:
    """A linear operator of the trace, known by its weight, or by some rows of a weight.

    Attributes:
        weight: full name of the weight.
        first: the first row of it that is the operator's.
        owner: full name of the module that holds the weight.
        rows: its output's channels.
        columns: `(in_channels,)`, what is read there, the same in each call.
        bias: `(out_channels,)`, numbers of the vectors that its bias is made of; None if it has none.
        own: whether the owner's own forward has called it each time.
        problem: why it can take no norm up, half a sentence, or ''.
    """
    weight: str
    first: int
    owner: str
    rows: Origin
    columns: Labels
    bias: Labels | None
    own: bool
    problem: str = ''

    @property
    def tensor(self) -> str:
        """Name of the weight in its module."""
        return self.weight.rpartition('.')[2]


@dataclass(eq=False)
class Call:
    """What a norm has read, over all its calls."""
    origin: Origin
    from_layers: bool = True  # whether all of it is the output of layers
    runs: int = 0
    why_not: str = ''


@dataclass
class Record:
    """All that a trace knows. Channels are numbers of one row for all norms, layers and vectors."""
    origins: list[Origin] = field(default_factory=list)
    layers: dict[tuple[str, int, int], Layer] = field(default_factory=dict)  # by weight, first row and end
    norms: dict[str, Call] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)  # parameters that something else reads, and what
    reasons: list[str] = field(default_factory=lambda: [''])
    # By channel: whose it is (a place in `origins`); why it is blocked (one in `reasons`); and for a layer's the norm
    # that reads it (a place in `origins`) with the channel that it is there.
    owner: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    blocked: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    read_by: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    read_as: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    def add(self, name: str, kind: str, size: int) -> Origin:
        """A new origin."""
        origin = Origin(name, kind, len(self.blocked), size)
        self.origins.append(origin)
        for attribute, value in (('owner', len(self.origins) - 1), ('blocked', 0), ('read_by', NOTHING),
                                 ('read_as', NOTHING)):
            old = getattr(self, attribute)
            setattr(self, attribute, torch.cat([old, torch.full((size, ), value)]))
        return origin

    def block(self, labels: Labels, why: str) -> None:
        """Something reads these channels that no norm can go into, or something other than the one norm behind them."""
        numbers = self.numbers(labels)
        if why not in self.reasons:
            self.reasons.append(why)
        free = numbers[self.blocked[numbers] == 0]
        self.blocked[free] = self.reasons.index(why)

    def numbers(self, labels: Labels) -> Tensor:
        """The different numbers in labels, in order."""
        seen = torch.zeros(len(self.blocked) + 1, dtype=torch.bool)
        seen[shrink(labels).flatten().cpu()] = True  # NOTHING is the last
        return seen[:-1].nonzero().flatten()

    def why_blocked(self, numbers: Tensor) -> str:
        """Why one of these channels is blocked, by what was seen first, or ''."""
        places = self.blocked[numbers]
        places = places[places > 0]
        return self.reasons[places.min()] if len(places) else ''

    def origins_of(self, numbers: Tensor) -> list[Origin]:
        """The origins of channels, in order."""
        return [self.origins[place] for place in self.owner[numbers].unique().tolist()]

    def note_norm(self, call: Call, labels: Labels | None, axis: int) -> None:
        """A norm has read a tensor of these labels, whose dimension `axis` is its channels."""
        call.runs += 1
        if labels is None or not bool((labels >= 0).all()):
            call.from_layers = False
            if labels is not None:
                self.block(labels, f'is read by the norm {call.origin.name}')
            return
        labels = shrink(labels, keep=axis).cpu()
        numbers = labels.flatten()
        if any(origin.kind != 'layer' for origin in self.origins_of(self.numbers(labels))):
            call.from_layers = False
            self.block(labels, f'is read by the norm {call.origin.name}')
            return
        place = self.origins.index(call.origin)
        shape = [1] * labels.dim()
        shape[axis] = -1
        channels = torch.arange(call.origin.size).view(shape).expand(labels.shape).flatten()
        new = self.read_by[numbers] == NOTHING
        self.read_by[numbers[new]] = place
        self.read_as[numbers[new]] = channels[new]
        wrong = (self.read_by[numbers] != place) | (self.read_as[numbers] != channels)
        self.block(numbers[wrong], f'is read by the norm {call.origin.name} and by another, or as several channels')
