"""What the runs of a model have shown, and the base of what records it."""
from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .folds import Use
from .obstacles import Obstacle
from .plan import FoldPlan
from .tags import NOTHING, Numbers, Source, Sources, Tag, unrepeated


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


class Recorder(TorchFunctionMode):
    """The tags of a run, and what consumes them."""

    def __init__(self, plan: FoldPlan):
        super().__init__()
        self._plan, self.trace = plan, Trace()
        self._sources = self.trace.sources
        self._start()

    def _start(self) -> None:
        """Before a run."""
        self._inside: list[str] = []  # the modules that are being called
        self._tagged: list[weakref.ref[Tensor]] = []
        self._scored: list[weakref.ref[Tensor]] = []
        self.is_suspended = False
        self.depth = 0  # of functions that are running

    def _set(self, tensor: Tensor, tag: Tag, crosses: bool = False) -> None:
        """`crosses`: whether it may be what a module returns to another."""
        if not hasattr(tensor, 'tag'):
            self._tagged.append(weakref.ref(tensor))
        tensor.tag, tensor.crosses = tag, crosses

    def _along(self, numbers: range, like: Tensor, axis: int) -> Tag:
        """The tag of a tensor like `like`, whose dimension `axis` is the channels of these numbers."""
        shape = [1] * like.dim()
        shape[axis] = -1
        tag = Tag(self._sources, np.broadcast_to(np.array(numbers).reshape(shape), like.shape))
        tag.found = list(numbers)
        return tag

    def _tokens(self, tensor: Tensor, axis: int) -> Numbers:
        """The numbers of a tensor's tokens `(n, C)`, equal ones once, where the dimension `axis` is the channels."""
        numbers, size = np.moveaxis(unrepeated(tensor.tag.numbers)[0], axis, -1), tensor.shape[axis]
        return np.broadcast_to(numbers, (*numbers.shape[:-1], size)).reshape(-1, size)

    def _sources_of(self, numbers: Numbers) -> list[int]:
        """The indices of the sources of these numbers."""
        return np.unique(self._sources.index[numbers[numbers >= 0]]).tolist()

    def _sources_in(self, numbers: Numbers) -> list[Source]:
        return [self._sources.all[index] for index in self._sources_of(numbers)]

    def _kinds(self, numbers: Numbers) -> set[str]:
        return {source.kind for source in self._sources_in(numbers)}

    def _written(self, numbers: Numbers) -> Numbers:
        return np.where(numbers >= 0, self._sources.written[numbers], numbers)

    def _channels(self, numbers: Numbers) -> Numbers:
        return np.where(numbers >= 0, self._sources.channel[numbers], numbers)

    def _join(self, indices: Sequence[int]) -> None:
        """Makes sources one residual stream."""
        self.trace.joined += [(indices[0], index) for index in indices[1:] if index != indices[0]]

    def _stream(self, numbers: Numbers) -> Numbers:
        """Makes the sources of written numbers one stream. Returns these with the same number for each channel."""
        indices = self._sources_of(numbers)
        self._join(indices)
        widest = max((self._sources.all[index].numbers for index in indices), key=len, default=range(0))
        return np.where(numbers >= 0, self._channels(numbers) + widest.start, NOTHING)

    def block(self, tensor: Tensor, use: Use) -> None:
        """Records that something other than a layer consumes a tensor."""
        if hasattr(tensor, 'tag'):
            self._add_use(tensor.tag.found, use)

    def _add_use(self, numbers: Iterable[int] | Numbers, use: Use) -> None:
        use = replace(use, inside=next(reversed(self._inside), ''))
        for number in np.unique(numbers[numbers >= 0]).tolist() if isinstance(numbers, Numbers) else numbers:
            known = self.trace.uses.setdefault(number, [])
            if use not in known:
                known.append(use)
