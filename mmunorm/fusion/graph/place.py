"""From what a trace has seen to where each norm goes."""
from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from ..check import call_obstacle, is_layer
from ..report import Site
from .trace import trace
from .traced import TracedLayer, TracedModel, TracedNorm


@torch.inference_mode()
def look(model: nn.Module, example) -> dict[str, tuple[list[Site], str]]:
    """Where the offline norms of a model can go by its graph, by full name: the layers, or why the norm stays.

    Args, errors: those of :func:`.trace.trace`.
    """
    traced = trace(model, example)
    uses = Counter(number for layer in traced.layers.values() for number in layer.bias or ())
    for layer in traced.layers.values():
        layer.problem = layer.problem or _problem(layer, traced, model.get_submodule(layer.owner), uses)
    return {name: _place(norm, traced) for name, norm in traced.norms.items()}


def _problem(layer: TracedLayer, traced: TracedModel, owner: nn.Module, uses: Counter) -> str:
    """Why a layer can take no norm up at all, half a sentence, or ''."""
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


def _place(norm: TracedNorm, traced: TracedModel) -> tuple[list[Site], str]:
    if norm.why_not or not norm.runs:
        return [], norm.why_not or 'did not run on the example'
    channels, layers = norm.gives.channels, traced.layers.values()
    readers = {layer: [number - channels.start if number in channels else -1 for number in layer.reads]
               for layer in layers if any(number in channels for number in layer.reads)}
    why = traced.why_blocked(channels) or next(
        (f'is read by {layer.owner}, which {layer.problem}' for layer in readers if layer.problem), '')
    if readers and not why:
        return [_site(layer, traced, False, places) for layer, places in readers.items()], ''
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
    return [_site(layer, traced, True, [read.get(number, -1) for number in layer.gives.channels])
            for layer in sources], ''


def _site(layer: TracedLayer, traced: TracedModel, after: bool, channels: list[int]) -> Site:
    vectors = [(traced.origin_of(number), number) for number in layer.bias or ()]
    bias = tuple((origin.name, number - origin.channels.start) for origin, number in vectors)
    tensor = layer.weight.rpartition('.')[2]
    return Site(layer.owner, after, tensor, layer.rows, tuple(channels), bias)
