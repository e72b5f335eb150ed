"""Step 2 of folding: looks what forbids it. Every reason is half a sentence, and '' says that there is none."""
from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import parametrize

from ..init.ntk import is_ntk
from ..norms.layers import ONLINE_NORMS, has_affine
from ..registry import lacks
from .padding import zero_token
from .report import Fold, Site, streams_of
from .rewrite import affine_of, has_act, layer_channels
from .rules import Stream, join
from .streams import range_obstacle, stations_of

_LINEARS = (nn.Linear.forward, )
_CONVS = (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
if not lacks('mmengine', 'mmcv'):
    from mmcv.cnn.bricks import wrappers
    _LINEARS += (wrappers.Linear.forward, )
    _CONVS += (wrappers.Conv2d.forward, wrappers.Conv3d.forward)
_BATCH_NORM = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def check(model: nn.Module, folds: list[Fold]) -> None:
    """Writes into each fold why its norm must stay, where no reason is found yet."""
    modules, owners = dict(model.named_modules(remove_duplicate=False)), Owners(model)
    sites = defaultdict(list)  # all of a layer's side
    for fold in folds:
        for site in fold.sites:
            sites[site.layer, site.after].append(site)
    for stream in streams_of(folds):
        for station in stations_of(modules[stream.layers], stream.layers):
            sites[station.last, True].append(Site(station.last, after=True))
    for fold in folds:
        fold.obstacle = fold.obstacle or _obstacle(fold, modules, owners, sites)
    by_norm = {fold.norm: fold for fold in folds}
    for stream in streams_of(folds):
        if reason := _stream_obstacle(model, stream, by_norm, owners):
            for fold in folds:
                if fold.stream == stream:
                    fold.obstacle = fold.obstacle or reason


def _obstacle(fold: Fold, modules: dict[str, nn.Module], owners: Owners, sites: dict[tuple, list[Site]]) -> str:
    norm = modules[fold.norm]
    if obstacle := norm_obstacle(norm, allow_act=fold.by_graph):
        return obstacle
    if shared := owners.others(fold.norm, norm):
        return f'is shared with {shared}'
    if fold.claims != 1:
        return f'{"several fold rules cover" if fold.claims else "no fold rule covers"} its place'
    if not fold.sites and not (fold.stream is not None and fold.stream.ends):
        return 'nothing in this model reads it'
    for name in fold.through:
        if obstacle := call_obstacle(modules[name]):
            return f'its output passes through {name}, which {obstacle}'
    scale, shift = affine_of(norm)
    for site in fold.sites:
        if site.layer not in modules:
            return f'its neighbour {site.layer} does not exist'
        layer, beside = modules[site.layer], sites[site.layer, site.after]
        if site.channels is None:
            if obstacle := layer_obstacle(layer, shift.numel(), site.after):
                return f'its neighbour {site.layer} {obstacle}'
            if scale.dim() > 1 and (site.after or getattr(layer, 'groups', 1) > 1):
                return f'it mixes channels, which its neighbour {site.layer} cannot take up'
        if site.layer not in fold.untied and (shared := owners.others(site.layer, layer)):
            return f'its neighbour {site.layer} is shared with {shared}'
        if len(beside) > 1 and any(other.channels is None for other in beside):
            return f'its neighbour {site.layer} has two norms beside it'
    if fold.pads and (len(fold.pads) > 1 or len(fold.sites) > 1):
        return 'zeros are padded in between it and several readers'
    if scale.dim() > 1 and (fold.pads or fold.stream is not None):
        return 'it mixes channels, and what it reads is padded with zeros, or carried in a stream'
    if fold.pads and fold.stream is None:  # a stream looks itself whether it can be carried
        dtype = modules[fold.sites[0].layer].weight.dtype
        if not zero_token(scale, shift).fits(dtype):
            return f'{str(dtype).removeprefix("torch.")} cannot hold the token that stands for zero padding after it'
    return ''


def _stream_obstacle(model: nn.Module, stream: Stream, by_norm: dict[str, Fold], owners: Owners) -> str:
    """Why all norms of a stream have to stay: one of them has to, or the stream cannot be carried to its end."""
    stations = stations_of(model.get_submodule(stream.layers), stream.layers)
    norms = [*(station.norm for station in stations), *stream.ends]
    if not by_norm.keys() >= set(norms):
        return 'norms of the stream it stands in are folded already'
    for norm in norms:
        if by_norm[norm].obstacle:
            return f'the stream it stands in cannot be carried past {norm}: {by_norm[norm].obstacle}'
    for station in stations:
        layer = model.get_submodule(station.last)
        if obstacle := layer_obstacle(layer, affine_of(model.get_submodule(station.norm))[1].numel(), after=True):
            return f'{station.last} {obstacle}'
        if shared := owners.others(station.last, layer):
            return f'{station.last} is shared with {shared}'
        if obstacle := call_obstacle(model.get_submodule(station.residual)):
            return f'{station.residual} {obstacle}'
    return range_obstacle(model, stations)


def norm_obstacle(norm: nn.Module, allow_act: bool = False) -> str:
    """Why `norm` cannot be folded into anything.

    With `allow_act`, it may have an activation after it: the graph knows what reads that.
    """
    kind = type(norm).__name__
    if getattr(norm, 'fold_obstacle', ''):
        return f'{kind} {norm.fold_obstacle}'
    if not has_affine(norm):
        if not isinstance(norm, _BatchNorm):
            online = isinstance(norm, (_NormBase, *ONLINE_NORMS))
            return f'{kind} {"computes its statistics at inference" if online else "has no affine() to fold"}'
        if type(norm).forward not in _BATCH_NORM and not (allow_act and has_act(norm)):
            return f'{kind} is no plain BatchNorm: it has a forward of its own'
        if norm.running_var is None:
            return 'keeps no running statistics'
    if obstacle := call_obstacle(norm):
        return obstacle
    return '' if all(value.isfinite().all() for value in affine_of(norm)) else 'its scale or shift is not finite'


def layer_obstacle(layer: nn.Module, num_features: int, after: bool = False) -> str:
    """Why `layer` cannot take up a norm of its input, or with `after` of its output."""
    if not is_layer(layer):
        return f'is a {type(layer).__name__}, not a linear layer or convolution'
    if parametrize.is_parametrized(layer) and not is_ntk(layer):
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


def call_obstacle(module: nn.Module) -> str:
    """Why calling `module` may do more than its class says."""
    if module._forward_hooks or module._forward_pre_hooks:
        return 'has forward hooks'
    return 'has another forward than its class' if 'forward' in vars(module) else ''


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer or convolution."""
    return type(module).forward in _LINEARS + _CONVS


class Owners:
    """Who else holds a module, or the memory of its parameters."""

    def __init__(self, model: nn.Module):
        self._names = defaultdict(list)
        for name, module in model.named_modules(remove_duplicate=False):
            self._names[id(module)].append(name)
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self._memory = [(name, *_span(tensor)) for name, tensor in tensors if tensor.layout == torch.strided]

    def others(self, name: str, module: nn.Module) -> str:
        """Another name of the module or of one of its parameters in the model, or ''."""
        if others := [alias for alias in self._names[id(module)] if alias != name]:
            return others[0]
        own = {join(name, parameter) for parameter, _ in module.named_parameters()}
        for start, end in map(_span, module.parameters()):
            for alias, other_start, other_end in self._memory:
                if alias not in own and other_start < end and start < other_end:
                    return alias
        return ''


def _span(parameter: torch.Tensor) -> tuple[int, int]:
    start = parameter.data_ptr() or id(parameter)
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return start, start + (last + 1) * parameter.element_size()
