"""What the runs of a model have shown."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .folds import Use
from .obstacles import Obstacle
from .tags import Numbers, Sources


@dataclass(eq=False)
class Layer:
    """A linear operator of the run, identified by its weight, or by some rows of a weight."""
    owner: str  # full name of the module that holds the weight
    weight: str  # full name of the weight
    rows: tuple[int, int]  # the rows of the weight that are the operator's, [first, end)
    weights: range  # the numbers of these rows
    outputs: range  # the numbers of its output channels
    inputs: list[int]  # at each channel of its input, the number of its source, or -1; the same in each call
    bias: tuple[tuple[str, int], ...]  # for each row, the vector that holds its bias and the index in it
    obstacle: Obstacle | None  # why nothing can be folded into it


@dataclass(eq=False)
class Attention:
    """One attention: the numbers of queries, keys and values, `(heads, d)` each, or None where they are no layers'."""
    queries: Numbers | None
    keys: Numbers | None
    values: Numbers | None


@dataclass
class Trace:
    """What the runs have shown."""
    sources: Sources = field(default_factory=Sources)
    layers: dict[tuple[str, int, int, str], Layer] = field(default_factory=dict)  # by weight, rows and owner
    uses: dict[int, list[Use]] = field(default_factory=dict)  # other than layers, by number
    ran: set[str] = field(default_factory=set)  # norms
    not_from_layers: set[str] = field(default_factory=set)  # norms whose input is not only the output of layers
    before: dict[int, tuple[str, int]] = field(default_factory=dict)  # the norm and its channel that read a number
    padded: dict[int, set[str | None]] = field(default_factory=dict)  # by number, modules that pad; None if not filled
    reads: dict[str, list[int]] = field(default_factory=dict)  # by norm, the number at each channel of its input
    joined: list[tuple[int, int]] = field(default_factory=list)  # indices of sources that are one stream
    scaled: dict[str, set[int]] = field(default_factory=dict)  # by LayerScale, the indices of what it multiplies
    attentions: list[Attention] = field(default_factory=list)
    scores_read: set[int] = field(default_factory=set)  # numbers of keys whose scores are read by more than a softmax
    called: set[str] = field(default_factory=set)  # modules
    used: set[str] = field(default_factory=set)  # parameters
    axes: dict[str, int] = field(default_factory=dict)  # of parameters whose channels are along another dimension

    def obstacle_of(self, numbers: Iterable[int], allowed: Sequence[str] = ()) -> Use | None:
        """A consumer of one of these numbers, except for these kinds."""
        return next((use for number in numbers for use in self.uses.get(number, ()) if use.code not in allowed), None)
