"""Step 2 of folding: checks what forbids it. Every reason is half a sentence, and '' says that there is none."""
from __future__ import annotations

from collections import defaultdict

from torch import nn
from torch.nn.utils import parametrize

from ..registry import lacks
from .affine import has_act
from .examples import is_removable
from .padding import zero_token
from .plan import FoldPlan, call_obstacle
from .report import Fold, Site, streams_of
from .rules import Stream
from .streams import range_obstacle

_LINEARS = (nn.Linear.forward, )
_CONVS = (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
if not lacks('mmengine', 'mmcv'):
    from mmcv.cnn.bricks import wrappers
    _LINEARS += (wrappers.Linear.forward, )
    _CONVS += (wrappers.Conv2d.forward, wrappers.Conv3d.forward)


def check(plan: FoldPlan) -> None:
    """Writes into each fold why its norm must stay, where no reason is found yet."""
    sites = defaultdict(list)  # all of a layer's side
    for fold in plan.folds:
        for site in fold.sites:
            sites[site.layer, site.after].append(site)
    for stream in streams_of(plan.folds):
        for station in stream.stations:
            sites[station.last, True].append(Site(station.last, after=True))
    for fold in plan.folds:
        fold.obstacle = fold.obstacle or _obstacle(fold, plan, sites)
    by_norm = {fold.norm: fold for fold in plan.folds}
    for stream in streams_of(plan.folds):
        if reason := _stream_obstacle(plan, stream, by_norm):
            for fold in plan.folds:
                if fold.stream == stream:
                    fold.obstacle = fold.obstacle or reason


def _obstacle(fold: Fold, plan: FoldPlan, sites: dict[tuple, list[Site]]) -> str:
    norm = plan.modules[fold.norm]
    if shared := plan.owners.others(fold.norm, norm):
        return f'is shared with {shared}'
    if has_act(norm) and not fold.by_graph:
        return f'{fold.kind} is no plain BatchNorm: only what runs on an example tells what reads its activation'
    if fold.claims != 1:
        return f'{"several fold rules cover" if fold.claims else "no fold rule covers"} its place'
    if not fold.sites and not (fold.stream is not None and fold.stream.ends):
        return 'nothing in this model reads it'
    for name in fold.through:
        if obstacle := call_obstacle(plan.modules[name]):
            return f'its output passes through {name}, which {obstacle}'
    scale, shift = plan.affines[fold.norm]
    for site in fold.sites:
        if site.layer not in plan.modules:
            return f'its neighbour {site.layer} does not exist'
        layer, beside = plan.modules[site.layer], sites[site.layer, site.after]
        if site.channels is None:
            if obstacle := layer_obstacle(layer, shift.numel(), site.after):
                return f'its neighbour {site.layer} {obstacle}'
            if scale.dim() > 1 and (site.after or getattr(layer, 'groups', 1) > 1):
                return f'it mixes channels, which its neighbour {site.layer} cannot take up'
        if site.layer not in fold.untied and (shared := plan.owners.others(site.layer, layer)):
            return f'its neighbour {site.layer} is shared with {shared}'
        if len(beside) > 1 and any(other.channels is None for other in beside):
            return f'its neighbour {site.layer} has two norms beside it'
        if adapter := _adapter(site.layer, plan):
            return (f'its neighbour {site.layer} is part of {adapter}, whose merge() would lose what the layer takes '
                    'up; merge it first (peft: merge_and_unload())')
    if fold.pads and (len(fold.pads) > 1 or fold.unpadded):
        return 'zeros are padded between it and some of its readers'
    if scale.dim() > 1 and (fold.pads or fold.stream is not None):
        return 'it mixes channels, and what it reads is padded with zeros, or carried in a stream'
    if fold.pads and fold.stream is None:  # a stream checks itself whether it can be carried
        dtype = plan.modules[fold.sites[0].layer].weight.dtype
        if not zero_token(scale, shift).fits(dtype):
            return f'{str(dtype).removeprefix("torch.")} cannot hold the token that stands for zero padding after it'
    return ''


def _stream_obstacle(plan: FoldPlan, stream: Stream, by_norm: dict[str, Fold]) -> str:
    """Why all norms of a stream have to stay: one of them has to, or the stream cannot be carried to its end."""
    norms = [*(station.norm for station in stream.stations), *stream.ends]
    if not by_norm.keys() >= set(norms):
        return 'norms of the stream it stands in are folded already'
    for norm in norms:
        fold = by_norm[norm]
        obstacle = fold.obstacle or ('' if fold.stream == stream or norm in stream.ends else 'it goes another way')
        if obstacle:
            return f'the stream it stands in cannot be carried past {norm}: {obstacle}'
    for station in stream.stations:
        layer = plan.modules[station.last]
        if obstacle := layer_obstacle(layer, plan.affines[station.norm][1].numel(), after=True):
            return f'{station.last} {obstacle}'
        if shared := plan.owners.others(station.last, layer):
            return f'{station.last} is shared with {shared}'
        if obstacle := call_obstacle(plan.modules[station.residual]):
            return f'{station.residual} {obstacle}'
    return range_obstacle(plan, stream)


def _adapter(layer: str, plan: FoldPlan) -> str:
    """The class of the adapter around a layer that is merged later, such as LoRA of peft; '' if there is none."""
    parts = layer.split('.')
    kinds = [type(plan.modules['.'.join(parts[:i])]) for i in range(len(parts))]
    return next((kind.__name__ for kind in kinds if callable(getattr(kind, 'merge', None))
                 and callable(getattr(kind, 'unmerge', None))), '')


def layer_obstacle(layer: nn.Module, num_features: int, after: bool = False) -> str:
    """Why `layer` cannot take up a norm of its input, or with `after` of its output."""
    if not is_layer(layer):
        return f'is a {type(layer).__name__}, not a linear layer or convolution'
    if parametrize.is_parametrized(layer) and not is_removable(layer):
        return 'has a parametrized weight'
    if isinstance(layer.weight, nn.Parameter) and type(layer.weight) is not nn.Parameter:
        return f'has a weight of {type(layer.weight).__name__}, which is no plain tensor'
    if obstacle := call_obstacle(layer):
        return obstacle
    if not after and type(layer).forward in _CONVS and layer.padding_mode == 'zeros' and layer.padding != 'valid' and (
            max(layer.kernel_size) > 1 if layer.padding == 'same' else any(layer.padding)):
        kernel = 'x'.join(map(str, layer.kernel_size))
        return f'is a {kernel} convolution that pads with zeros, which are not normalized'
    channels = layer_channels(layer, after)
    verb = 'gives' if after else 'reads'
    return '' if channels == num_features else f'{verb} {channels} channels where the norm has {num_features}'


def layer_channels(layer: nn.Module, after: bool = False) -> int:
    """How many channels a linear layer or convolution reads, or with `after` gives."""
    return layer.weight.shape[0] if after else layer.weight.shape[1] * getattr(layer, 'groups', 1)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer or convolution."""
    return type(module).forward in _LINEARS + _CONVS
