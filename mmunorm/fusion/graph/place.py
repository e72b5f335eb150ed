"""From what a trace has seen to where each norm goes."""
from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from ...norms.layers import is_norm
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
    users = Counter(number for layer in record.layers.values() if layer.bias is not None
                    for number in layer.bias.tolist())
    for layer in record.layers.values():
        layer.problem = layer.problem or _problem(layer, record, model, users)
    return {name: _place(record.norms[name], record) for name, module in model.named_modules()
            if is_norm(module) and name in record.norms}


def _problem(layer: Layer, record: Record, model: nn.Module, users: Counter) -> str:
    """Why a layer can take no norm up at all, half a sentence, or ''."""
    if layer.weight in record.foreign:
        return f'has a weight that {record.foreign[layer.weight]}, too'
    if any(other is not layer and other.weight == layer.weight and other.first < layer.first + layer.rows.size
           and layer.first < other.first + other.rows.size for other in record.layers.values()):
        return 'has a weight of which another layer uses some rows, too'
    owner = model.get_submodule(layer.owner)
    if obstacle := call_obstacle(owner):
        return obstacle
    if layer.bias is not None:
        if why := record.why_blocked(layer.bias):
            return f'has a bias that {why}, too'
        return 'shares its bias' if any(users[number] > 1 for number in layer.bias.tolist()) else ''
    makes_bias = is_layer(owner) or isinstance(owner, nn.MultiheadAttention) and layer.tensor == 'in_proj_weight'
    if not layer.own or not makes_bias:
        return f'is called without a bias, and it is not known whether {type(owner).__name__} would use one'
    return ''


def _place(call: Call, record: Record) -> tuple[list[Site], str]:
    if call.why_not or not call.runs:
        return [], call.why_not or 'did not run on the example'
    norm, place = call.origin, record.origins.index(call.origin)
    readers = [layer for layer in record.layers.values() if bool(norm.has(layer.columns).any())]
    why = record.why_blocked(torch.arange(norm.start, norm.start + norm.size)) or next(
        (f'is read by {layer.owner}, which {layer.problem}' for layer in readers if layer.problem), '')
    if readers and not why:
        return [_site(layer, record, False, torch.where(norm.has(layer.columns), layer.columns - norm.start, -1))
                for layer in readers], ''
    sources, why_not_before = _sources(call, place, record)
    if why_not_before:
        return [], f"its output {why or 'is read by nothing'}; {why_not_before}"
    rows = [slice(layer.rows.start, layer.rows.start + layer.rows.size) for layer in sources]
    return [_site(layer, record, True, torch.where(record.read_by[part] == place, record.read_as[part], -1))
            for layer, part in zip(sources, rows, strict=True)], ''


def _sources(call: Call, place: int, record: Record) -> tuple[list[Layer], str]:
    """The layers that a norm can go back into, and why not."""
    if not call.from_layers:
        return [], 'its input is not that of linear layers alone'
    rows = (record.read_by == place).nonzero().flatten()
    sources = [layer for layer in record.layers.values() if bool(layer.rows.has(rows).any())]
    if why := record.why_blocked(rows):
        return [], f'the output of {", ".join(layer.owner for layer in sources)} before it {why}, too'
    return sources, next((f'{layer.owner} before it {layer.problem}' for layer in sources if layer.problem), '')


def _site(layer: Layer, record: Record, after: bool, channels: Tensor) -> Site:
    bias = ()
    if layer.bias is not None:
        vectors = {origin.start + i: (origin.name, i) for origin in record.origins_of(layer.bias)
                   for i in range(origin.size)}
        bias = tuple(vectors[number] for number in layer.bias.tolist())
    rows = layer.first, layer.first + layer.rows.size
    return Site(layer.owner, after, layer.tensor, rows, tuple(channels.tolist()), bias)
