"""Chooses the target of each norm from a trace."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from ..affine import statistic_of
from ..check import is_layer
from ..plan import FoldPlan, call_obstacle
from ..report import Fold, Site
from .traced import TracedLayer, TracedModel, TracedNorm


class Places:
    """The targets of the norms of a plan, given a trace."""

    def __init__(self, plan: FoldPlan, traced: TracedModel):
        self._plan, self._traced = plan, traced
        uses = Counter(number for layer in traced.layers.values() for number in layer.bias or ())
        for layer in traced.layers.values():
            layer.problem = layer.problem or self._problem(layer, uses)
        self._own: dict[str, list[int]] = {}  # the numbers of each norm's own weight and bias
        for origin in traced.origins:
            if origin.kind == 'vector':
                self._own.setdefault(origin.name.rpartition('.')[0], []).extend(origin.channels)
        self._read_as_bias = set(uses)

    def fold(self, name: str) -> Fold:
        """The layers that a norm is folded into, or why it is kept."""
        fold = Fold(name, type(self._plan.norms[name]).__name__, obstacle=self._plan.obstacles[name])
        norm = self._traced.norms.get(name)
        if fold.obstacle:
            return fold
        if norm is None or not norm.runs:
            fold.obstacle = norm.why_not if norm is not None and norm.why_not else 'did not run on the example'
        elif why := norm.why_not or self._why_own(name):
            fold.obstacle = why
        elif name in self._plan.stations and not statistic_of(self._plan.norms[name]):
            self._place_in_stream(fold, norm)
        else:
            self._place(fold, norm)
        return fold

    def _why_own(self, name: str) -> str:
        """Why the uses of the norm's own parameters prevent folding, or ''."""
        own = self._own.get(name, ())
        if why := self._traced.why_blocked(own):
            return f'its weight or bias {why}, too'
        return '' if self._read_as_bias.isdisjoint(own) else 'its weight or bias is the bias of a layer, too'

    def _problem(self, layer: TracedLayer, uses: Counter) -> str:
        """Why no norm can be folded into a layer, as half a sentence, or ''."""
        traced, owner = self._traced, self._plan.modules[layer.owner]
        if layer.owner not in self._plan.untied and layer.tensor in traced.foreign:
            return f'has a weight that {traced.foreign[layer.tensor]}, too'
        (first, end), others = layer.rows, (other for other in traced.layers.values() if other is not layer)
        if any(other.tensor == layer.tensor and other.rows[0] < end and first < other.rows[1] for other in others):
            return 'has a weight of which another layer uses some rows, too'
        if obstacle := call_obstacle(owner):
            return obstacle
        if layer.bias is not None:
            if why := traced.why_blocked(layer.bias):
                return f'has a bias that {why}, too'
            return 'shares its bias' if any(uses[number] > 1 for number in layer.bias) else ''
        is_attention = isinstance(owner, nn.MultiheadAttention) and layer.weight.endswith('in_proj_weight')
        if not layer.own or not (is_layer(owner) or is_attention):
            return f'is called without a bias, and it is not known whether {type(owner).__name__} would use one'
        return ''

    def _readers(self, norm: TracedNorm) -> dict[TracedLayer, list[int]]:
        """The layers that consume a norm, with the norm's channel at each of their inputs, or -1."""
        channels = norm.gives.channels
        return {layer: [number - channels.start if number in channels else -1 for number in layer.reads]
                for layer in self._traced.layers.values() if any(number in channels for number in layer.reads)}

    def _into(self, fold: Fold, readers: dict[TracedLayer, list[int]]) -> None:
        fold.sites = [self._site(layer, False, channels) for layer, channels in readers.items()]
        fold.untied = [layer.owner for layer in readers if layer.owner in self._plan.untied
                       and self._plan.owners.others(layer.owner, self._plan.modules[layer.owner])]

    def _padding(self, norm: TracedNorm) -> set[str | None]:
        """The modules that pad the output of a norm with zeros; None for one that cannot fill it."""
        return {name for number in norm.gives.channels for name in self._traced.padded.get(number, ())}

    def _place(self, fold: Fold, norm: TracedNorm) -> None:
        traced, layers, readers = self._traced, self._traced.layers.values(), self._readers(norm)
        padding = self._padding(norm)
        obstacles = sorted(traced.obstacles(norm.gives.channels), key=lambda each: each.is_padding)
        why = obstacles[0].why if obstacles else ''
        if why and obstacles[0].is_padding and len(padding) == 1 and None not in padding and all(
                padding <= layer.within for layer in readers):
            fold.pads, why = [(name, self._plan.fills[name]) for name in padding], ''
        why = why or self._problem_of(readers)
        if readers and not why:
            return self._into(fold, readers)
        fold.pads = []
        why = f"its output {why or 'is consumed by nothing'}; "
        read = {number: channel for number, (reader, channel) in traced.readers.items() if reader is norm.gives}
        sources = list(dict.fromkeys(layer for layer in layers for number in read if number in layer.gives.channels))
        if statistic_of(self._plan.norms[fold.norm]):
            fold.obstacle = why.removesuffix('; ')
        elif not norm.from_layers:
            fold.obstacle = f'{why}its input is not only the output of linear layers'
        elif set(read.values()) != set(range(len(norm.gives.channels))):
            fold.obstacle = f'{why}the layer before it is consumed by another norm, too'
        elif why_not := traced.why_blocked(read):
            names = ', '.join(layer.owner for layer in sources)
            fold.obstacle = f'{why}the output of {names} before it {why_not}, too'
        elif problem := next((f'{layer.owner} before it {layer.problem}' for layer in sources if layer.problem), ''):
            fold.obstacle = why + problem
        else:
            fold.sites = [self._site(layer, True, [read.get(number, -1) for number in layer.gives.channels])
                          for layer in sources]

    def _place_in_stream(self, fold: Fold, norm: TracedNorm) -> None:
        """Places a norm that is consumed by the next sum and the next sublayer, or by the end of the stream."""
        (stream, reader), readers = self._plan.stations[fold.norm], self._readers(norm)
        others = [layer.owner for layer in readers if reader and not f'{layer.owner}.'.startswith(f'{reader.part}.')]
        why = f'is consumed by {others[0]}, which is not the next sublayer' if others else ''
        # The next sum is also a consumer. At the end, norms are; one may follow an im2col.
        ends = [] if reader else ['is consumed by im2col', *(f'is consumed by the norm {end}' for end in stream.ends)]
        why = why or next((each.why for each in self._traced.obstacles(norm.gives.channels) if not each.is_padding
                           and not (reader and each.inside == reader.residual) and each.why not in ends), '')
        padding = self._padding(norm)
        if not why and None in padding:
            why = 'is padded with zeros that cannot be filled'
        if why := why or self._problem_of(readers):
            fold.obstacle = f'its output {why}'
        elif not readers and not (stream.ends and reader is None):
            fold.obstacle = 'its output is consumed by nothing in this model'
        else:
            fold.stream = stream
            fold.pads = [(name, self._plan.fills[name]) for name in sorted(padding)]
            self._into(fold, readers)

    @staticmethod
    def _problem_of(readers: Iterable[TracedLayer]) -> str:
        return next((f'is consumed by {layer.owner}, which {layer.problem}' for layer in readers if layer.problem), '')

    def _site(self, layer: TracedLayer, after: bool, channels: list[int]) -> Site:
        vectors = [(self._traced.origin_of(number), number) for number in layer.bias or ()]
        bias = tuple((origin.name, number - origin.channels.start) for origin, number in vectors)
        tensor = layer.weight.rpartition('.')[2]
        return Site(layer.owner, after, tensor, layer.rows, tuple(channels), bias)
