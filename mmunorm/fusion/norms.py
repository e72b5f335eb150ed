"""The affine map of a norm: a scale and a shift for each channel, after the statistics of each token, if it has any."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ..norms.layers import ONLINE_NORMS, has_affine
from ..norms.replace import is_layer_norm, is_rms
from .obstacles import Obstacle

Affine = tuple[Tensor, Tensor]

_BATCH_NORM = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def is_frozen(norm: nn.Module) -> bool:
    """Whether `norm` is a frozen BatchNorm, which has only buffers, as in torchvision and transformers' DETR family."""
    return type(norm).__name__.endswith('FrozenBatchNorm2d') and {
        'weight', 'bias', 'running_mean', 'running_var'} <= dict(norm.named_buffers(recurse=False)).keys()


def statistic_of(norm: nn.Module) -> str:
    """What a norm computes for each token at inference: a 'variance' (LayerNorm), a 'mean_square' (RMSNorm), or ''."""
    if is_rms(norm):
        return 'mean_square'
    return 'variance' if is_layer_norm(norm) else ''


def affine_of(norm: nn.Module) -> Affine:
    """Scale and shift of a norm at inference, `(C,)` float64: mmunorm's, torch's BatchNorm, a frozen one, or LayerNorm.

    The scale of a norm that mixes channels is a matrix `(C, C)`. Those of LayerNorm and RMSNorm are gamma and beta.
    """
    if statistic_of(norm):
        like = torch.ones(norm.normalized_shape, dtype=torch.float64)
        weight, bias = getattr(norm, 'weight', None), getattr(norm, 'bias', None)
        scale = like if weight is None else weight.detach().double()
        return scale, torch.zeros_like(scale) if bias is None else bias.detach().double()
    if has_affine(norm):
        return norm.affine()
    scale = (norm.running_var.double() + getattr(norm, 'eps', 1e-5)).rsqrt()  # transformers' has no `eps`
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -scale * norm.running_mean.double()
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    return scale, shift


def class_obstacle(norm: nn.Module, layer_norms: str = 'exact') -> Obstacle | None:
    """Why no norm of this class can be folded, or None."""
    kind = type(norm).__name__
    if getattr(norm, 'fold_obstacle', ''):
        return Obstacle('class', kind, norm.fold_obstacle)
    if statistic_of(norm):
        if layer_norms == 'keep':
            return Obstacle('kept on request', kind)
        if len(norm.normalized_shape) > 1:
            return Obstacle('class', kind, 'normalizes over several dimensions')
        return Obstacle('class', kind, 'includes an activation') if any(True for _ in norm.parameters()) and any(
            not isinstance(part, nn.Identity) for part in norm.children()) else None
    if has_affine(norm) or is_frozen(norm):
        return None
    if not isinstance(norm, _BatchNorm):
        is_online = isinstance(norm, (_NormBase, *ONLINE_NORMS))
        return Obstacle('online', kind) if is_online else Obstacle('class', kind, 'has no affine()')
    if type(norm).forward not in _BATCH_NORM:
        return Obstacle('class', kind, 'overrides the forward of BatchNorm')
    return None if norm.running_var is not None else Obstacle('class', kind, 'has no running statistics')
