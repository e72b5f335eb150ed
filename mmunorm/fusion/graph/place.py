"""From what a trace has seen to where each norm goes, and the folding of it."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...norms.layers import is_norm
from ..algebra import call_obstacle, is_layer
from .record import Layer, Origin, Record
from .trace import trace


@dataclass(frozen=True)
class Site:
    """A layer that takes a norm up: in front of some of its input's channels, or behind some of its output's.

    Attributes:
        layer: full name of the module that holds the weight.
        weight: full name of the weight.
        rows: the first of its rows that are the layer's, and the end.
        behind: whether the norm is behind the layer.
        channels: for each channel that the layer reads (`behind`: gives), the norm's channel there, or -1.
        bias: for each channel that the layer gives, the vector that holds its bias and the place in there; empty if the
            layer gets a bias.
    """
    layer: str
    weight: str
    rows: tuple[int, int]
    behind: bool
    channels: tuple[int, ...]
    bias: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Place:
    """Where a norm goes, or why it stays: half a sentence."""
    sites: tuple[Site, ...] = ()
    why: str = ''


@torch.inference_mode()
def look(model: nn.Module, example) -> dict[str, Place]:
    """Where the offline norms of a model can go by its graph, by full name.

    Args, errors: those of :func:`.trace.trace`.
    """
    record = trace(model, example)
    users = Counter(number for layer in record.layers.values() if layer.bias is not None
                    for number in layer.bias.tolist())
    for layer in record.layers.values():
        layer.problem = layer.problem or _problem(layer, record, model, users)
    return {name: _place(name, record) for name, module in model.named_modules()
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
    if not layer.own or _bias_name(owner, layer.weight) is None:
        return f'is called without a bias, and it is not known whether {type(owner).__name__} would use one'
    return ''


def _bias_name(owner: nn.Module, weight: str) -> str | None:
    """The name that a new bias beside a weight has in its module; None if the module is of another kind."""
    if isinstance(owner, nn.MultiheadAttention):
        return 'in_proj_bias' if weight.rpartition('.')[2] == 'in_proj_weight' else None
    return 'bias' if is_layer(owner) else None


def _place(name: str, record: Record) -> Place:
    call = record.norms[name]
    if call.why_not:
        return Place(why=call.why_not)
    if not call.runs:
        return Place(why='did not run on the example')
    norm = call.origin
    readers = [layer for layer in record.layers.values() if bool(norm.has(layer.columns).any())]
    own = torch.arange(norm.start, norm.start + norm.size)
    why_into = record.why_blocked(own) or next(
        (f'is read by {layer.owner}, which {layer.problem}' for layer in readers if layer.problem), '')
    if readers and not why_into:
        return Place(tuple(_site(layer, norm, layer.columns, layer.columns, False, record) for layer in readers))
    why_behind, sources = _behind(call, record)
    if sources:
        return Place(tuple(_site(layer, norm, record.read_by[_rows(layer)], record.read_as[_rows(layer)], True, record)
                           for layer in sources))
    return Place(why=f"its output {why_into or 'is read by nothing'}; {why_behind}")


def _rows(layer: Layer) -> slice:
    return slice(layer.rows.start, layer.rows.start + layer.rows.size)


def _behind(call, record: Record) -> tuple[str, list[Layer]]:
    """The layers that a norm can go into backwards; none, and why."""
    if not call.from_layers:
        return 'its input is not that of linear layers alone', []
    rows = (record.read_by == record.origins.index(call.origin)).nonzero().flatten()
    sources = [layer for layer in record.layers.values() if bool(layer.rows.has(rows).any())]
    names = ', '.join(layer.owner for layer in sources)
    if why := record.why_blocked(rows):
        return f'the output of {names} in front of it {why}, too', []
    if problem := next((f'{layer.owner} in front of it {layer.problem}' for layer in sources if layer.problem), ''):
        return problem, []
    return '', sources


def _site(layer: Layer, norm: Origin, owners: Tensor, channels: Tensor, behind: bool, record: Record) -> Site:
    if behind:
        mine, places = owners == record.origins.index(norm), channels
    else:
        mine, places = norm.has(owners), channels - norm.start
    bias = ()
    if layer.bias is not None:
        vectors = {origin.start + i: (origin.name, i) for origin in record.origins_of(layer.bias)
                   for i in range(origin.size)}
        bias = tuple(vectors[number] for number in layer.bias.tolist())
    rows = layer.first, layer.first + layer.rows.size
    return Site(layer.owner, layer.weight, rows, behind, tuple(torch.where(mine, places, -1).tolist()), bias)


@torch.no_grad()
def fold_into(model: nn.Module, sites: Iterable[Site], scale: Tensor, shift: Tensor) -> tuple[str, ...]:
    """Folds a norm of this scale and shift, `(C,)` float64, into layers, in place.

    Returns:
        The tensors that a checkpoint of the unfolded model has not: new biases, and buffers that were not saved.
    """
    made = []
    for site in sites:
        weight = model.get_parameter(site.weight)[slice(*site.rows)]
        channels = torch.tensor(site.channels, device=weight.device)
        touched = channels >= 0
        s, t = scale.to(weight.device)[channels], shift.to(weight.device)[channels]
        s, t = torch.where(touched, s, 1.), torch.where(touched, t, 0.)
        made += _make_bias(model, site)
        wide = weight.double()
        trailing = (1, ) * (weight.dim() - 2)
        if site.behind:
            weight.copy_(wide * s.view(-1, 1, *trailing))
            _change_bias(model, site, s, t)
            continue
        groups = len(channels) // weight.shape[1]
        s, t = (value.view(groups, -1).repeat_interleave(len(weight) // groups, 0).view(*weight.shape[:2], *trailing)
                for value in (s, t))
        _change_bias(model, site, None, (wide * t).flatten(1).sum(1))
        weight.copy_(wide * s)
    return tuple(made)


def _make_bias(model: nn.Module, site: Site) -> list[str]:
    """Lets a layer have a bias that is part of the model's state; the names of what is new there."""
    if site.bias:
        names = dict.fromkeys(name for name, _ in site.bias)
    else:
        owner = model.get_submodule(site.layer)
        names = [_bias_name(owner, site.weight)]
        if isinstance(owner, nn.MultiheadAttention):  # torch's fast path takes both biases or none
            names.append('out_proj.bias')
        names = [f'{site.layer}.{name}'.lstrip('.') for name in names]
    return [name for name in names if add_to_state(model, name)]


def add_to_state(model: nn.Module, name: str) -> bool:
    """Makes a bias, zero, where there is none, and lets a buffer be saved with the model; whether it did either."""
    owner, _, tensor = name.rpartition('.')
    module = model.get_submodule(owner)
    if tensor in module._non_persistent_buffers_set:
        module._non_persistent_buffers_set.discard(tensor)
        return True
    if getattr(module, tensor, None) is not None:
        return False
    weight = getattr(module, tensor.replace('bias', 'weight'))
    setattr(module, tensor, nn.Parameter(weight.new_zeros(len(weight)), requires_grad=weight.requires_grad))
    return True


def _change_bias(model: nn.Module, site: Site, scale: Tensor | None, shift: Tensor) -> None:
    """`b' = scale * b + shift`, wherever the parts of b are kept."""
    if not site.bias:
        owner = model.get_submodule(site.layer)
        parts = {f'{site.layer}.{_bias_name(owner, site.weight)}'.lstrip('.'): (slice(None), slice(*site.rows))}
    else:
        parts = {}
        for name in dict.fromkeys(name for name, _ in site.bias):
            rows = [row for row, (vector, _) in enumerate(site.bias) if vector == name]
            parts[name] = rows, [site.bias[row][1] for row in rows]
    for name, (rows, places) in parts.items():
        owner, _, tensor = name.rpartition('.')
        vector = getattr(model.get_submodule(owner), tensor)
        old = vector[places].double()
        vector[places] = ((old if scale is None else old * scale[rows]) + shift[rows]).to(vector.dtype)

