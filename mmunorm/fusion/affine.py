"""The affine map that a norm computes at inference: a scale and a shift for each channel."""
from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ..norms.layers import ONLINE_NORMS, has_affine

Affine = tuple[Tensor, Tensor]

_BATCH_NORM = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def has_act(norm: nn.Module) -> bool:
    """Whether `norm` is timm's BatchNorm with an activation after it."""
    return f'{type(norm).__module__}.{type(norm).__qualname__}' == 'timm.layers.norm_act.BatchNormAct2d'


def is_frozen(norm: nn.Module) -> bool:
    """Whether `norm` is a frozen BatchNorm, which has only buffers, as in torchvision and transformers' DETR family."""
    return type(norm).__name__.endswith('FrozenBatchNorm2d') and {
        'weight', 'bias', 'running_mean', 'running_var'} <= dict(norm.named_buffers(recurse=False)).keys()


def affine_of(norm: nn.Module) -> Affine:
    """Scale and shift of an offline norm at inference, `(C,)` float64: mmunorm's, torch's BatchNorm or a frozen one.

    The scale of a norm that mixes channels is a matrix `(C, C)`.
    """
    if has_affine(norm):
        return norm.affine()
    scale = (norm.running_var.double() + getattr(norm, 'eps', 1e-5)).rsqrt()  # transformers' has no `eps`
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -scale * norm.running_mean.double()
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    return scale, shift


def class_obstacle(norm: nn.Module) -> str:
    """Why no norm of this class can be folded, as half a sentence, or ''."""
    kind = type(norm).__name__
    if getattr(norm, 'fold_obstacle', ''):
        return f'{kind} {norm.fold_obstacle}'
    if has_affine(norm) or is_frozen(norm):
        return ''
    if not isinstance(norm, _BatchNorm):
        is_online = isinstance(norm, (_NormBase, *ONLINE_NORMS))
        why = 'computes its statistics at inference' if is_online else 'has no affine()'
        return f'{kind} {why}{"; convert_norms replaces it" if isinstance(norm, nn.LayerNorm) else ""}'
    if type(norm).forward not in _BATCH_NORM and not has_act(norm):
        return f'{kind} overrides the forward of BatchNorm'
    return '' if norm.running_var is not None else 'has no running statistics'
