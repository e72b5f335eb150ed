"""Exact rewritings of attention that help INT8: rotated heads, and keys and values minus a constant.

Scores are products of a query and a key, so one orthogonal matrix R for each head may go into both. Probabilities sum
to 1, so a matrix, and a constant c, of the values pass through to the layer that reads them: `W_v' = R W_v`,
`b_v' = R (b_v - c)`, `W_o' = W_o R^T`, `b_o' = b_o + W_o c`. A softmax does not see a number that is added to a whole
row, so `b_k' = R (b_k - c)`. If c is the mean over tokens and images, keys and values need less of a range.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .basis import head_rotation
from .folds import Site, join
from .plan import FoldPlan
from .recorder import Layer, Trace
from .streams import change_obstacle
from .tags import Numbers
from .targets import layers_reading, site_of


@dataclass(eq=False)
class AttentionFold:
    """What changes with the queries and keys, or the values, of one attention: layers, each with `W' = M W`,
    `b' = M b + s`, or as their inverse in a layer that reads them."""
    changes: list[tuple[Site, Tensor, Tensor]]


def find_attentions(trace: Trace, plan: FoldPlan, rotates: bool, means: Mapping[str, Tensor]) -> list[AttentionFold]:
    """The attentions of a model whose heads can be rotated, or whose keys and values have a constant to subtract.

    `means` are, by full name of a weight, the mean of each output of its layer.
    """
    found, done = [], set()
    for attention in trace.attentions:
        for fold_of, parts in ((_values_fold, [attention.values]), (_scores_fold, [attention.keys, attention.queries])):
            if any(part is None for part in parts):
                continue
            key = tuple(np.unique(np.concatenate(parts)).tolist())
            fold = None if key in done else fold_of(trace, plan, *parts, rotates, means, len(found))
            done.add(key)
            found += [] if fold is None else [fold]
    return found


def _values_fold(trace: Trace, plan: FoldPlan, values: Numbers, rotates: bool, means: Mapping[str, Tensor],
                 seed: int) -> AttentionFold | None:
    numbers = values.flatten().tolist()
    readers = layers_reading(trace, numbers)
    sites = _head_sites(trace, plan, values, ('value', ))
    if sites is None or not readers or any(change_obstacle(layer, plan, 'reader') for layer in readers):
        return None
    matrix, constants = _matrix(values, rotates, seed), torch.cat([_constant(site, means) for site in sites])
    changes = [_change(site, matrix, means) for site in sites]
    for layer in readers:
        inverse = _inverse(layer, np.sort(values, 0), matrix, constants.view(values.shape))
        if inverse is None:
            return None
        changes.append((site_of(layer, False), *inverse))
    return AttentionFold(changes) if rotates or constants.any() else None


def _inverse(layer: Layer, values: Numbers, matrix: Tensor, constants: Tensor) -> tuple[Tensor, Tensor] | None:
    """The matrix and constant for a layer that reads values, `(C, C)` and `(C,)`; None if it reads parts of heads."""
    if layer.inputs == values.flatten().tolist():
        return matrix.mT, constants.flatten()
    columns: dict[int, list[int]] = {}
    for column, number in enumerate(layer.inputs):
        columns.setdefault(number, []).append(column)
    scale, shift = torch.eye(len(layer.inputs), dtype=torch.float64), torch.zeros(len(layer.inputs)).double()
    for head, constant in zip(values.tolist(), constants, strict=True):
        places = [columns.pop(number, []) for number in head]
        if len({len(place) for place in places}) > 1:
            return None
        for place in zip(*places, strict=True):
            index = torch.tensor(place)
            scale[index[:, None], index] = matrix.mT
            shift[index] = constant
    return scale, shift


def _scores_fold(trace: Trace, plan: FoldPlan, keys: Numbers, queries: Numbers, rotates: bool,
                 means: Mapping[str, Tensor], seed: int) -> AttentionFold | None:
    # Groups of queries share a key, which has one matrix.
    partners = dict(zip(map(tuple, queries.tolist()), map(tuple, keys.tolist()), strict=True))
    unique_keys, unique_queries = np.unique(keys, axis=0), np.unique(queries, axis=0)
    if len(partners) != len(keys):  # a query that meets several keys
        return None
    key_sites = _head_sites(trace, plan, unique_keys, ('key', 'scale'))
    query_sites = _head_sites(trace, plan, unique_queries, ('query', 'scale'))
    if key_sites is None:
        return None
    rotates = rotates and query_sites is not None
    matrix = _matrix(keys, rotates, seed)
    is_read = trace.scores_read & set(unique_keys.flatten().tolist())
    changes = [_change(site, matrix, {} if is_read else means) for site in key_sites]
    changes += [_change(site, matrix, {}) for site in (query_sites if rotates else ())]
    return AttentionFold(changes) if rotates or any(shift.any() for _, _, shift in changes) else None


def _change(site: Site, matrix: Tensor, means: Mapping[str, Tensor]) -> tuple[Site, Tensor, Tensor]:
    """`x' = M (x - c)` for each head of a layer."""
    return site, matrix, -(_constant(site, means).view(-1, len(matrix)) @ matrix.mT).flatten()


def _matrix(heads: Numbers, rotates: bool, seed: int) -> Tensor:
    width = heads.shape[1]
    return head_rotation(width, seed) if rotates else torch.eye(width, dtype=torch.float64)


def _head_sites(trace: Trace, plan: FoldPlan, heads: Numbers, allowed: Iterable[str]) -> list[Site] | None:
    """The rows of layers that compute these heads; None if these are no rows of layers, or used otherwise."""
    numbers = heads.flatten().tolist()
    if len(set(numbers)) != len(numbers) or trace.obstacle_of(numbers, tuple(allowed)) or (
            any(number in trace.before for number in numbers)):
        return None
    sites: list[Site] = []
    for head in sorted(heads.tolist()):
        layers = [layer for layer in trace.layers.values() if head[0] in layer.outputs]
        if len(layers) != 1 or head != list(range(head[0], head[0] + len(head))) or head[-1] not in layers[0].outputs:
            return None
        layer, first = layers[0], head[0] - layers[0].outputs.start
        if change_obstacle(layer, plan, 'writer'):
            return None
        whole, rows = site_of(layer, True), (layer.rows[0] + first, layer.rows[0] + first + len(head))
        bias = layer.bias[first:first + len(head)]
        if sites and (sites[-1].layer, sites[-1].rows[1]) == (whole.layer, rows[0]):  # heads side by side
            rows, bias = (sites[-1].rows[0], rows[1]), sites.pop().bias + bias
        sites.append(Site(whole.layer, True, whole.weight, rows, None, bias))
    return sites


def _constant(site: Site, means: Mapping[str, Tensor]) -> Tensor:
    mean = means.get(join(site.layer, site.weight))
    return torch.zeros(site.rows[1] - site.rows[0]).double() if mean is None else mean[slice(*site.rows)]


class OutputMeans(TorchFunctionMode):
    """Measures the mean of each output of linear layers, over tokens and images, in the runs within it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._sums: dict[str, tuple[Tensor, int]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            self._add(*args, **kwargs)
        elif func is F.multi_head_attention_forward:
            self._add(args[:3], *args[5:7])
        return func(*args, **kwargs)

    @torch.no_grad()
    def _add(self, input: Tensor | Sequence[Tensor], weight: Tensor | None, bias: Tensor | None = None) -> None:
        """Each of several inputs has its part of the weight."""
        if (name := self._names.get(id(weight))) is None:
            return
        inputs = [input] if isinstance(input, Tensor) else input
        tokens = [x.reshape(-1, x.shape[-1]).double() for x in inputs]
        mean = torch.cat([part.double() @ x.mean(0) for part, x in zip(weight.chunk(len(inputs)), tokens, strict=True)])
        total, seen = self._sums.get(name, (0., 0))
        mean = (mean if bias is None else mean + bias.double()).cpu()
        self._sums[name] = total + mean * len(tokens[0]), seen + len(tokens[0])

    def means(self) -> dict[str, Tensor]:
        """By full name of a weight, the mean outputs of its layer, float64."""
        return {name: total / seen for name, (total, seen) in self._sums.items()}
