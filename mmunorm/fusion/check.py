"""Step 2 of folding: checks why a norm cannot fold. Each reason is half a sentence; '' means that there is none."""
from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

from ..registry import lacks
from .examples import is_removable
from .padding import zero_token
from .plan import FoldPlan, call_obstacle
from .report import Fold, streams_of
from .rules import Stream
from .streams import range_obstacle

_LAYERS = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
if not lacks('mmengine', 'mmcv'):
    from mmcv.cnn.bricks import wrappers
    _LAYERS += (wrappers.Linear.forward, wrappers.Conv2d.forward, wrappers.Conv3d.forward)


def check(plan: FoldPlan) -> None:
    """Sets the obstacle of each fold whose norm must be kept, unless it is already set."""
    for fold in plan.folds:
        fold.obstacle = fold.obstacle or _obstacle(fold, plan)
    by_norm = {fold.norm: fold for fold in plan.folds}
    for stream in streams_of(plan.folds):
        if reason := _stream_obstacle(plan, stream, by_norm):
            for fold in plan.folds:
                if fold.stream == stream:
                    fold.obstacle = fold.obstacle or reason


def _obstacle(fold: Fold, plan: FoldPlan) -> str:
    scale, shift = plan.affines[fold.norm]
    for site in fold.sites:
        layer = plan.modules[site.layer]
        weight = getattr(layer, site.weight)
        if isinstance(weight, nn.Parameter) and type(weight) is not nn.Parameter:
            return f'its neighbour {site.layer} has a weight of type {type(weight).__name__}, not a plain tensor'
        if scale.dim() > 1 and (site.after or site.channels != tuple(range(len(shift)))
                                or weight.shape[1] != len(shift)):
            return f'it mixes channels, which cannot be folded into its neighbour {site.layer}'
        if site.layer not in fold.untied and (shared := plan.owners.others(site.layer, layer)):
            return f'its neighbour {site.layer} is shared with {shared}'
        if adapter := adapter_of(site.layer, plan):
            return (f'its neighbour {site.layer} is part of {adapter}, whose merge() would undo the fold; '
                    'merge it first (peft: merge_and_unload())')
    if scale.dim() > 1 and (fold.pads or fold.stream is not None):
        return 'it mixes channels, and its input is padded with zeros or is part of a residual stream'
    if fold.pads and fold.stream is None:  # `range_obstacle` checks streams
        dtype = plan.modules[fold.sites[0].layer].weight.dtype
        if not zero_token(scale, shift).fits(dtype):
            return f'{str(dtype).removeprefix("torch.")} cannot represent the padding token that replaces zeros'
    return ''


def _stream_obstacle(plan: FoldPlan, stream: Stream, by_norm: dict[str, Fold]) -> str:
    """Why all norms of a stream must be kept, or '': one of them must be, or the factors cannot be carried on."""
    norms = [*(station.norm for station in stream.stations), *stream.ends]
    if not by_norm.keys() >= set(norms):
        return 'norms of its residual stream are folded already'
    for norm in norms:
        if obstacle := by_norm[norm].obstacle:
            return f'its residual stream cannot be folded past {norm}: {obstacle}'
    for station in stream.stations:
        layer = plan.modules[station.last]
        if obstacle := layer_obstacle(layer):
            return f'{station.last} {obstacle}'
        if shared := plan.owners.others(station.last, layer):
            return f'{station.last} is shared with {shared}'
        if obstacle := call_obstacle(plan.modules[station.residual]):
            return f'{station.residual} {obstacle}'
    return range_obstacle(plan, stream)


def adapter_of(layer: str, plan: FoldPlan) -> str:
    """The class of the adapter around a layer that can be merged later, such as peft's LoRA; '' without one."""
    parts = layer.split('.')
    kinds = [type(plan.modules['.'.join(parts[:i])]) for i in range(len(parts))]
    return next((kind.__name__ for kind in kinds if callable(getattr(kind, 'merge', None))
                 and callable(getattr(kind, 'unmerge', None))), '')


def layer_obstacle(layer: nn.Module) -> str:
    """Why a factor of its output cannot be folded into `layer`, or ''."""
    if not is_layer(layer):
        return f'is a {type(layer).__name__}, not a linear layer or convolution'
    if parametrize.is_parametrized(layer) and not is_removable(layer):
        return 'has a parametrized weight'
    return call_obstacle(layer)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer or convolution."""
    return type(module).forward in _LAYERS
