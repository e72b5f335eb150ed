"""From what a trace has seen to where each norm goes."""
from __future__ import annotations

import re
from collections import Counter

from torch import nn

from ..check import is_layer
from ..plan import FoldPlan, call_obstacle
from ..report import Fold, Site
from .traced import TracedLayer, TracedModel, TracedNorm

# A norm in a residual stream is also read by the sum, and by norms after it.
_OF_STREAMS = re.compile('is read by (add|addcmul|mul|im2col|the norm )')


class Places:
    """Where the offline norms of a model can go by what ran on an example."""

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

    def of(self, name: str) -> tuple[list[Site], str]:
        """The layers that a norm can go into, or why it stays."""
        norm = self._traced.norms.get(name)
        if norm is None or norm.why_not or not norm.runs:
            return [], norm.why_not if norm is not None and norm.why_not else 'did not run on the example'
        if why := self._traced.why_blocked(self._own.get(name, ())):
            return [], f'its weight or bias {why}, too'
        if not self._read_as_bias.isdisjoint(self._own.get(name, ())):
            return [], 'its weight or bias is the bias of a layer, too'
        if norm.mixes:
            return [], 'it mixes channels, which only rules fold'
        return self._place(norm)

    def confirm(self, fold: Fold, plan: FoldPlan) -> bool:
        """Whether what a rule says is what ran: the layers that it names, and nothing else, have read the norm."""
        norm = self._traced.norms.get(fold.norm)
        if fold.obstacle or fold.claims != 1 or norm is None or norm.why_not or not norm.runs:
            return False
        claimed = {(site.layer, site.after) for site in fold.sites}
        sites, _ = self.of(fold.norm)
        if sites:
            return claimed == {(site.layer, site.after) for site in sites}
        obstacles = self._traced.obstacles(norm.gives.channels)
        return claimed == {(layer.owner, False) for layer in self._readers(norm)} and all(
            (fold.pads or fold.stream) if each.is_padding else fold.stream and _OF_STREAMS.match(each.why)
            for each in obstacles) and bool(fold.pads or fold.stream or fold.untied or norm.mixes)

    def _readers(self, norm: TracedNorm) -> dict[TracedLayer, list[int]]:
        """The layers that read a norm alone, with its channel at each of theirs, or -1."""
        channels = norm.gives.channels
        return {layer: [number - channels.start if number in channels else -1 for number in layer.reads]
                for layer in self._traced.layers.values() if any(number in channels for number in layer.reads)}

    def _problem(self, layer: TracedLayer, uses: Counter) -> str:
        """Why a layer can take no norm up at all, half a sentence, or ''."""
        traced, owner = self._traced, self._plan.modules[layer.owner]
        if layer.weight in traced.foreign:
            return f'has a weight that {traced.foreign[layer.weight]}, too'
        (first, end), others = layer.rows, (other for other in traced.layers.values() if other is not layer)
        if any(other.weight == layer.weight and other.rows[0] < end and first < other.rows[1] for other in others):
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

    def _place(self, norm: TracedNorm) -> tuple[list[Site], str]:
        traced, layers = self._traced, self._traced.layers.values()
        readers = self._readers(norm)
        why = traced.why_blocked(norm.gives.channels) or next(
            (f'is read by {layer.owner}, which {layer.problem}' for layer in readers if layer.problem), '')
        if readers and not why:
            return [self._site(layer, False, places) for layer, places in readers.items()], ''
        why = f"its output {why or 'is read by nothing'}; "
        if not norm.from_layers:
            return [], f'{why}its input is not that of linear layers alone'
        read = {number: channel for number, (reader, channel) in traced.readers.items() if reader is norm.gives}
        sources = list(dict.fromkeys(layer for layer in layers for number in read if number in layer.gives.channels))
        if why_not := traced.why_blocked(read):
            names = ', '.join(layer.owner for layer in sources)
            return [], f'{why}the output of {names} before it {why_not}, too'
        for layer in sources:
            if layer.problem:
                return [], f'{why}{layer.owner} before it {layer.problem}'
        return [self._site(layer, True, [read.get(number, -1) for number in layer.gives.channels])
                for layer in sources], ''

    def _site(self, layer: TracedLayer, after: bool, channels: list[int]) -> Site:
        vectors = [(self._traced.origin_of(number), number) for number in layer.bias or ()]
        bias = tuple((origin.name, number - origin.channels.start) for origin, number in vectors)
        tensor = layer.weight.rpartition('.')[2]
        return Site(layer.owner, after, tensor, layer.rows, tuple(channels), bias)
