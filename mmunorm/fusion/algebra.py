"""The algebra of folding (Algorithm 1) on single layers, in float64, and what forbids it."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from mmcv.cnn.bricks import wrappers
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import parametrize

from ..init.ntk import is_ntk
from ..norms import Norm
from ..norms.layers import ONLINE_NORMS
from .padding import Fill

LINEARS = (nn.Linear.forward, wrappers.Linear.forward)
CONVS = (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward, wrappers.Conv2d.forward,
         wrappers.Conv3d.forward)
_BATCH_NORM = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class FoldedNorm(nn.Identity):
    """Where a norm stood that has been folded away.

    Its buffer marks a folded checkpoint: neither a folded nor an unfolded one loads into the other kind of
    model unseen.

    Args:
        made: for a norm that was folded by the model's graph, the tensors that the layers beside it have got into the
            model's state by that. Defaults to None, for one that a rule knows.
    """

    def __init__(self, made: Sequence[str] | None = None):
        super().__init__()
        self.made = made
        self.register_buffer('folded', torch.tensor(True))

    def forward(self, x: Tensor, pad_mask: Tensor | None = None, data_format: str | None = None) -> Tensor:
        """Answers `x`; the other arguments are taken because the norms take them."""
        return x

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if prefix + 'weight' in state_dict:
            raise RuntimeError(
                f'{prefix}weight: the model is folded, this checkpoint is not. Load it into the model that '
                'its own config builds, then fold that with mmunorm.fuse_norms(model).')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


Norm.refused_state['folded'] = (
    'this checkpoint is of a folded model, and this one has norms. Fold it first with '
    "mmunorm.fuse_norms(model.eval()), or let mmunorm.fusion.load_folded build the model of this checkpoint.")


class FoldedNormAct(FoldedNorm):
    """Where a norm of timm stood that has an activation in it: that is left."""

    def __init__(self, made: Sequence[str] | None, norm: nn.Module):
        super().__init__(made)
        self.drop, self.act = norm.drop, norm.act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(x))


def has_act(norm: nn.Module) -> bool:
    """Whether `norm` is timm's BatchNorm with an activation behind it."""
    return f'{type(norm).__module__}.{type(norm).__qualname__}' == 'timm.layers.norm_act.BatchNormAct2d'


def norm_obstacle(norm: nn.Module, allow_act: bool = False) -> str:
    """Why `norm` cannot be folded into anything, half a sentence, or ''.

    With `allow_act`, it may have an activation behind it: what is in front of it can take it up.
    """
    if getattr(norm, 'fold_obstacle', ''):
        return f'{type(norm).__name__} {norm.fold_obstacle}'
    if not callable(getattr(norm, 'affine', None)):
        if not isinstance(norm, _BatchNorm):
            online = isinstance(norm, (_NormBase, *ONLINE_NORMS))
            what = 'computes its statistics at inference' if online else 'has no affine() to fold'
            return f'{type(norm).__name__} {what}'
        if type(norm).forward not in _BATCH_NORM and not (allow_act and has_act(norm)):
            return f'{type(norm).__name__} is no plain BatchNorm: it has a forward of its own'
        if norm.running_var is None:
            return 'keeps no running statistics'
    if obstacle := call_obstacle(norm):
        return obstacle
    if not all(value.isfinite().all() for value in affine_of(norm)):
        return 'its scale or shift is not finite'
    return ''


def affine_of(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Scale and shift of an offline norm at inference, `(C,)` float64: ours or torch's BatchNorm.

    The scale of a norm that mixes channels is a matrix `(C, C)`.
    """
    if callable(getattr(norm, 'affine', None)):  # torch's BatchNorm has a bool of this name
        return norm.affine()
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -scale * norm.running_mean.double()
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    return scale, shift


def layer_obstacle(layer: nn.Module) -> str:
    """Why `layer` cannot take a norm up, in front of it or behind it; half a sentence, or ''."""
    if not is_layer(layer):
        return f'is a {type(layer).__name__}, not a linear layer or convolution'
    if parametrize.is_parametrized(layer) and not is_ntk(layer):
        return 'has a parametrized weight'
    return call_obstacle(layer)


def call_obstacle(module: nn.Module) -> str:
    """Why calling `module` may do more than its class says; half a sentence, or ''."""
    if module._forward_hooks or module._forward_pre_hooks:
        return 'has forward hooks'
    return 'has another forward than its class' if 'forward' in vars(module) else ''


def reader_obstacle(reader: nn.Module, num_features: int) -> str:
    """Why `reader` cannot absorb a norm of its input; half a sentence, or ''."""
    if obstacle := layer_obstacle(reader):
        return obstacle
    if is_conv(reader):
        kernel = 'x'.join(map(str, reader.kernel_size))
        if reader.padding_mode == 'zeros' and reader.padding != 'valid' and (
                reader.padding == 'same' and max(reader.kernel_size) > 1
                or reader.padding != 'same' and any(reader.padding)):
            return f'is a {kernel} convolution that pads with zeros, which are not normalized'
    channels = num_channels(reader)
    return '' if channels == num_features else f'reads {channels} channels where the norm has {num_features}'


def source_obstacle(source: nn.Module, num_features: int) -> str:
    """Why `source` cannot absorb a norm of its output; half a sentence, or ''."""
    if obstacle := layer_obstacle(source):
        return obstacle
    channels = num_channels(source, behind=True)
    return '' if channels == num_features else f'gives {channels} channels where the norm has {num_features}'


def num_channels(layer: nn.Module, behind: bool = False) -> int:
    """How many channels a linear layer or convolution reads, or with `behind` gives."""
    return layer.weight.shape[0] if behind else layer.weight.shape[1] * getattr(layer, 'groups', 1)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer or convolution."""
    return type(module).forward in LINEARS + CONVS


def is_conv(layer: nn.Module) -> bool:
    return type(layer).forward in CONVS


@torch.no_grad()
def absorb_before(reader: nn.Module, scale: Tensor, shift: Tensor, fill: Fill | None = None) -> None:
    """`W' = W diag(scale)`, `b' = b + W shift` for a norm in front of a linear layer or convolution.

    With a matrix `W' = W scale`. A bias is made where there is none. With a `fill`, the column of its marker undoes
    the shifts that the rest of the token does not.
    """
    weight = reader.weight.double()
    out_channels, in_channels = weight.shape[:2]  # in_channels of one group
    groups = getattr(reader, 'groups', 1)
    trailing = (1,) * (weight.dim() - 2)

    def by_output(values: Tensor) -> Tensor:
        values = values.to(weight.device).view(groups, in_channels)
        values = values.repeat_interleave(out_channels // groups, dim=0)
        return values.view(out_channels, in_channels, *trailing)

    extra = (weight * by_output(shift)).flatten(1).sum(1)
    _set_bias(reader, extra if reader.bias is None else reader.bias.double() + extra)
    folded = (weight * by_output(scale) if scale.dim() == 1 else
              torch.einsum('oi...,ij->oj...', weight, scale.to(weight.device)))
    if fill is not None and fill.marker >= 0:
        undone = fill.undone.to(weight.device)
        folded[:, fill.marker] = -weight[:, undone] @ shift.to(weight.device)[undone]
    reader.weight.copy_(folded)


@torch.no_grad()
def absorb_behind(source: nn.Module, scale: Tensor, shift: Tensor) -> None:
    """`W' = diag(scale) W`, `b' = scale * b + shift` for a norm behind a linear layer or convolution."""
    scale, shift = scale.to(source.weight.device), shift.to(source.weight.device)
    source.weight.copy_(source.weight.double() * scale.view(-1, *(1,) * (source.weight.dim() - 1)))
    _set_bias(source, shift if source.bias is None else scale * source.bias.double() + shift)


def _set_bias(layer: nn.Module, bias: Tensor) -> None:
    if layer.bias is None:
        layer.bias = nn.Parameter(bias.to(layer.weight.dtype), requires_grad=layer.weight.requires_grad)
    else:
        layer.bias.copy_(bias)

