"""Residual streams, from what a run has shown: what writes and reads each, and why its basis cannot change."""
from __future__ import annotations

from operator import attrgetter

from torch import nn
from torch.nn.utils import parametrize

from .check import layer_obstacle
from .folds import Reader, Stream, Writer
from .norms import statistic_of
from .obstacles import Obstacle
from .plan import FoldPlan
from .recorder import Layer, Trace
from .tags import Source
from .targets import layers_reading, site_of

# What a stream may go through: linear functions that are the same for all channels.
_LINEAR = ('sum', 'scale', 'maybe padded', 'padded convolution', 'mixed', 'norm', 'other norm')


def find_streams(trace: Trace, plan: FoldPlan) -> list[Stream]:
    """The residual streams of a model whose norms have folds, in the order in which their norms ran."""
    sources, parents = trace.sources, list(range(len(trace.sources.all)))

    def root(index: int) -> int:
        while parents[index] != index:
            index = parents[index]
        return index

    for a, b in trace.joined:  # added to each other, or read by one layer or norm
        parents[root(a)] = root(b)
    members: dict[int, list[Source]] = {}
    for index, source in enumerate(sources.all):
        members.setdefault(root(index), []).append(source)
    read = [number for columns in trace.reads.values() for number in columns if number >= 0]
    roots = dict.fromkeys(root(index) for index in sources.index[sources.written[read]].tolist())
    return [stream for index in roots if (stream := _stream(members[index], trace, plan)) is not None]


def _stream(sources: list[Source], trace: Trace, plan: FoldPlan) -> Stream | None:
    """The stream of these sources, or None for the output of one layer that is added to nothing."""
    width = len(sources[0].numbers)
    pure = [trace.sources.of[kind, source.name] for source in sources
            for written, kind in (('written norm', 'norm'), ('token', 'parameter')) if source.kind == written]
    numbers = {number for source in (*sources, *pure) for number in source.numbers}
    stream = Stream(width)
    obstacles = [_add_writer(stream, source, trace, plan) for source in sources]
    for name, read in trace.reads.items():
        if not numbers.isdisjoint(trace.sources.written[read].tolist()):
            stream.readers.append(Reader(name, True, tuple(trace.sources.channel[read].tolist())))
    for layer in layers_reading(trace, numbers):
        channels = tuple(trace.sources.channel[layer.inputs].tolist())
        stream.readers.append(Reader(layer.owner, False, channels, site_of(layer, False)))
        obstacles.append(change_obstacle(layer, plan, 'reader'))
    if len(sources) < 2 or not stream.norms:
        return None
    for source in (*sources, *pure):
        if use := trace.obstacle_of(source.numbers, _LINEAR):
            obstacles.append(Obstacle('stream used', source.name, cause=use))
        if len(source.numbers) != width:
            obstacles.append(Obstacle('parts', source.name))
    for reader in stream.readers:  # of all channels of one or several tokens
        if sorted(reader.channels) != sorted([*range(width)] * (len(reader.channels) // width)):
            obstacles.append(Obstacle('parts', reader.name or 'a layer'))
    stream.obstacle = next(filter(None, obstacles), None)
    return stream


def _add_writer(stream: Stream, source: Source, trace: Trace, plan: FoldPlan) -> Obstacle | None:
    """Adds what writes a source to a stream. Returns why it cannot be changed, or None."""
    if source.kind == 'scaled':
        layers = [trace.sources.all[index] for index in trace.scaled.get(source.name, ())]
        if len(layers) != 1 or layers[0].kind != 'layer' or (
                trace.obstacle_of(layers[0].numbers, ('layer scale', 'scale'))):
            return Obstacle('layer scales', source.name) if len(layers) > 1 else Obstacle(
                'writer', source.name, cause=Obstacle('shared', 'another use'))
        if other := trace.obstacle_of(trace.sources.of['parameter', source.name].numbers, ('layer scale', )):
            return Obstacle('writer', source.name, cause=other)
        if not attrgetter(source.name)(plan.model).all():
            return Obstacle('zero scale', source.name)
        return _add_layer(stream, layers[0], trace, plan, source.name)
    if source.kind == 'layer':
        return _add_layer(stream, source, trace, plan)
    if source.kind == 'written norm':
        return _add_norm(stream, source.name, plan)
    stream.writers.append(Writer('token', source.name, axis=source.axis))
    owner, _, _ = source.name.rpartition('.')
    module = plan.modules[owner]
    if isinstance(module, nn.Embedding) and (type(module) is not nn.Embedding or module.max_norm is not None or (
            parametrize.is_parametrized(module))):
        return Obstacle('writer', owner, cause=Obstacle('no layer', type(module).__name__))
    if held := plan.overlapping([source.name]):
        return Obstacle('writer', source.name, cause=Obstacle('shared', held))
    return None


def _add_layer(stream: Stream, source: Source, trace: Trace, plan: FoldPlan, scale: str = '') -> Obstacle | None:
    layers = [layer for layer in trace.layers.values() if not set(layer.outputs).isdisjoint(source.numbers)]
    for layer in layers:
        stream.writers.append(Writer('layer', layer.owner, site_of(layer, True), scale))
    if len(layers) != 1 or len(layers[0].outputs) != len(source.numbers):
        return Obstacle('parts', source.name)
    return change_obstacle(layers[0], plan, 'writer')


def change_obstacle(layer: Layer, plan: FoldPlan, kind: str) -> Obstacle | None:
    """Why a layer, a 'writer' or 'reader', cannot write or read another basis, or None."""
    if layer.obstacle:
        return Obstacle(kind, layer.owner, cause=layer.obstacle)
    module = plan.modules[layer.owner]
    if getattr(module, 'groups', 1) > 1:
        return Obstacle('groups', layer.owner)
    if isinstance(module, nn.MultiheadAttention):
        held = plan.held_elsewhere(layer.owner)
        return held and Obstacle(kind, layer.owner, cause=held)
    return layer_obstacle(layer.owner, plan)


def _add_norm(stream: Stream, name: str, plan: FoldPlan) -> Obstacle | None:
    fold, norm = plan.folds[name], plan.norms[name]
    if statistic_of(norm):
        stream.writers.append(Writer('norm', name))
        return plan.obstacles[name] and Obstacle('writer', name, cause=plan.obstacles[name])
    if fold.obstacle or len(fold.sites) != 1 or not fold.sites[0].after or (
            fold.sites[0].channels != tuple(range(stream.width))):
        return Obstacle('writer', name, cause=fold.obstacle or Obstacle('class', type(norm).__name__, 'is folded'))
    stream.writers.append(Writer('layer', fold.sites[0].layer, fold.sites[0]))
    return layer_obstacle(fold.sites[0].layer, plan)
