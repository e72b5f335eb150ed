"""From what a trace has seen to where each norm goes."""
from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from ..check import call_obstacle, is_layer
from ..report import Site
from .record import Call, Layer, Record
from .trace import trace


@torch.inference_mode()
def look(model: nn.Module, example) -> dict[str, tuple[list[Site], str]]:
    """Where the offline norms of a model can go by its graph, by full name: the layers, or why the norm stays.

    Args, errors: those of :func:`.trace.trace`.
    """
    record = trace(model, example)
    uses = Counter(number for layer in record.layers.values() for number in layer.bias or ())
    for layer in record.layers.values():
        layer.problem = layer.problem or _problem(layer, record, model.get_submodule(layer.owner), uses)
    return {name: _place(call, record) for name, call in record.norms.items()}


def _problem(layer: Layer, record: Record, owner: nn.Module, uses: Counter) -> str:
    """Why a layer can take no norm up at all, half a sentence, or ''."""
    if layer.weight in record.foreign:
        return f'has a weight that {record.foreign[layer.weight]}, too'
    (first, end), others = layer.rows, (other for other in record.layers.values() if other is not layer)
    if any(other.weight == layer.weight and other.rows[0] < end and first < other.rows[1] for other in others):
        return 'has a weight of which another layer uses some rows, too'
    if obstacle := call_obstacle(owner):
        return obstacle
    if layer.bias is not None:
        if why := record.why_blocked(layer.bias):
            return f'has a bias that {why}, too'
        return 'shares its bias' if any(uses[number] > 1 for number in layer.bias) else ''
    is_attention = isinstance(owner, nn.MultiheadAttention) and layer.weight.endswith('in_proj_weight')
    if not layer.own or not (is_layer(owner) or is_attention):
        return f'is called without a bias, and it is not known whether {type(owner).__name__} would use one'
    return ''


def _place(call: Call, record: Record) -> tuple[list[Site], str]:
    if call.why_not or not call.runs:
        return [], call.why_not or 'did not run on the example'
    norm, layers = call.origin, record.layers.values()
    readers = {layer: [number - norm.channels.start if number in norm.channels else -1 for number in layer.reads]
               for layer in layers if any(number in norm.channels for number in layer.reads)}
    why = record.why_blocked(norm.channels) or next(
        (f'is read by {layer.owner}, which {layer.problem}' for layer in readers if layer.problem), '')
    if readers and not why:
        return [_site(layer, record, False, channels) for layer, channels in readers.items()], ''
    why = f"its output {why or 'is read by nothing'}; "
    if not call.from_layers:
        return [], f'{why}its input is not that of linear layers alone'
    read = [number for number, (reader, _) in record.readers.items() if reader is norm]
    sources = list(dict.fromkeys(layer for layer in layers for number in read if number in layer.gives.channels))
    names = ', '.join(layer.owner for layer in sources)
    if why_not := record.why_blocked(read):
        return [], f'{why}the output of {names} before it {why_not}, too'
    for layer in sources:
        if layer.problem:
            return [], f'{why}{layer.owner} before it {layer.problem}'
    by_channel = {number: record.readers[number][1] for number in read}
    return [_site(layer, record, True, [by_channel.get(number, -1) for number in layer.gives.channels])
            for layer in sources], ''


def _site(layer: Layer, record: Record, after: bool, channels: list[int]) -> Site:
    vectors = [(record.origin_of(number), number) for number in layer.bias or ()]
    bias = tuple((origin.name, number - origin.channels.start) for origin, number in vectors)
    tensor = layer.weight.rpartition('.')[2]
    return Site(layer.owner, after, tensor, layer.rows, tuple(channels), bias)
