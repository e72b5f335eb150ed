"""Which layers each norm is folded into, from what a run has shown."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from .folds import Fold, Site, join
from .norms import statistic_of
from .obstacles import Obstacle
from .plan import FoldPlan
from .recorder import Layer, Trace

# Consumers that would be linear layers if the padding were not zeros. Layers that a LayerNorm or RMSNorm is folded into
# tell zeros from tokens, see `basis`.
_ZEROS = ('mixed', 'padded convolution', 'maybe padded')


def fold_of(name: str, trace: Trace, plan: FoldPlan) -> Fold:
    """The layers that a norm is folded into, or why it is kept."""
    fold = Fold(name, type(plan.norms[name]).__name__, obstacle=plan.obstacles[name])
    if fold.obstacle:
        return fold
    sources = [trace.sources.of.get(('parameter', f'{name}.{vector}')) for vector in ('weight', 'bias')]
    parameters = [number for source in sources if source for number in source.numbers]
    if name not in trace.reads:
        fold.obstacle = Obstacle('did not run')
    elif use := trace.obstacle_of(parameters):
        fold.obstacle = Obstacle('affine used', cause=use)
    elif other := _alternative(name, trace, plan):
        fold.obstacle = Obstacle('alternative', other)
    else:
        _place(fold, trace, plan)
    return fold


def _alternative(name: str, trace: Trace, plan: FoldPlan) -> str:
    """A norm that did not run in a module that has norms alone, such as one for each of two adapters; or ''."""
    parent, _, _ = name.rpartition('.')
    parts = [join(parent, child) for child, _ in plan.modules[parent].named_children()]
    if not all(part in plan.norms for part in parts):
        return ''
    return next((part for part in parts if part not in trace.reads and part in plan.affines), '')


def layers_reading(trace: Trace, numbers: Iterable[int]) -> list[Layer]:
    """The layers whose input has one of these channels."""
    numbers = set(numbers)
    return [layer for layer in trace.layers.values() if not numbers.isdisjoint(layer.inputs)]


def _layer_obstacle(layers: Sequence[Layer], trace: Trace, plan: FoldPlan) -> Obstacle | None:
    """Why a norm cannot be folded into all of these layers, or None."""
    for layer in layers:
        use = None if layer.owner in plan.copyable else trace.obstacle_of(layer.weights)
        if obstacle := layer.obstacle or use and Obstacle('weight used', cause=use):
            return Obstacle('neighbor', layer.owner, cause=obstacle)
    return None


def site_of(layer: Layer, after: bool, channels: Iterable[int] | None = None) -> Site:
    """A layer as a place to fold into."""
    return Site(layer.owner, after, layer.weight.rpartition('.')[2], layer.rows,
                None if channels is None else tuple(channels), layer.bias)


def _place(fold: Fold, trace: Trace, plan: FoldPlan) -> None:
    """Into the layers that consume a norm, or else into those before it."""
    channels, is_online = trace.sources.of['norm', fold.norm].numbers, bool(statistic_of(plan.norms[fold.norm]))
    joint = None if is_online else plan.joint_of.get(fold.norm)
    readers = layers_reading(trace, channels)
    uses = [use for number in channels for use in trace.uses.get(number, ())]
    allowed = [use for use in uses if joint is not None and joint.allows(fold.norm, use)]
    padding = {name for number in channels for name in trace.padded.get(number, ())}
    can_fill = padding and None not in padding
    # Tokens of zeros stay what they are if a LayerNorm marks the others.
    is_marked = is_online and not any(use.code == 'joined' for use in uses)
    obstacles = [use for use in uses if use not in allowed and not (
        use.code in _ZEROS and (can_fill or is_marked)) and use.code != 'joined']
    use = min(obstacles, key=lambda use: use.code in _ZEROS, default=None)
    if use or not (readers or allowed):
        fold.obstacle = Obstacle('used', cause=use or Obstacle('nothing'))
    else:
        fold.obstacle = _layer_obstacle(readers, trace, plan)
    if not fold.obstacle:
        fold.joint, fold.is_padded = joint, is_online and bool(padding or any(use.code in _ZEROS for use in uses))
        fold.pads = [] if is_online else [(name, plan.fills[name]) for name in sorted(padding)]
        fold.sites = [site_of(layer, False, (number - channels.start if number in channels else -1
                                             for number in layer.inputs)) for layer in readers]
        fold.norms_after = list(dict.fromkeys(use.norm for use in allowed if use.norm))
        fold.copied = [layer.owner for layer in readers
                       if layer.owner in plan.copyable and plan.other_name(layer.owner)]
    elif joint is None and not is_online:
        _place_before(fold, len(channels), trace, plan)


def _place_before(fold: Fold, size: int, trace: Trace, plan: FoldPlan) -> None:
    channels = {number: channel for number, (norm, channel) in trace.before.items() if norm == fold.norm}
    layers = [layer for layer in trace.layers.values() if not channels.keys().isdisjoint(layer.outputs)]
    is_alone = fold.norm not in trace.not_from_layers and set(channels.values()) == set(range(size))
    if is_alone and not (trace.obstacle_of(channels, ('layouts', )) or layers_reading(trace, channels)
                         or _layer_obstacle(layers, trace, plan)):
        fold.obstacle = None
        fold.sites = [site_of(layer, True, [channels.get(number, -1) for number in layer.outputs]) for layer in layers]
