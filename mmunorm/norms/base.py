"""The base class of the norms, and checks of arguments."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..registry import MODELS, registered
from ..utils import nearest


class Norm(nn.Module):
    """A norm over tokens of shape `(..., C)`; `num_features` is C.

    Subclasses implement `_normalize(x)`, or `_normalize_tokens(x, valid)` if they have statistics over tokens.

    A norm that can be folded has `affine()`. `fold_obstacle` is why another cannot, the rest of a sentence that begins
    with the norm's name; it takes precedence over `affine()`.
    """
    # mmcv names layers by it; LN's name lets a model load the affine part of an LN checkpoint.
    _abbr_ = 'ln'
    fold_obstacle: str = ''

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = check_count('num_features', num_features, minimum=1)

    def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        """Normalizes `x`; returns the same shape and dtype.

        Args:
            x: `(..., C)`, any floating dtype. Statistics are computed in float32 (float64 for float64).
            pad_mask: bool, `x.shape[:-1]`, True where a token is padding: normalized like the others, but it and its
                gradient are left out of every statistic over tokens. Used in training only.

        Raises:
            ValueError, TypeError: the shape, or the dtype, of `x` or of `pad_mask` does not fit.
        """
        name = type(self).__name__
        if x.shape[-1:] != (self.num_features, ):
            raise ValueError(f'{name}: the last dimension of x must be num_features={self.num_features}, '
                             f'got x of shape {tuple(x.shape)}')
        if not x.is_floating_point():
            raise TypeError(f'{name}: x must be a floating-point tensor, got {x.dtype}')
        if pad_mask is not None and pad_mask.shape != x.shape[:-1]:
            raise ValueError(f'{name}: pad_mask must have the shape of x without channels, '
                             f'{tuple(x.shape[:-1])}, got {tuple(pad_mask.shape)}')
        if pad_mask is not None and pad_mask.dtype != torch.bool:
            raise TypeError(f'{name}: pad_mask must be bool, True where a token is padding, '
                            f'got {pad_mask.dtype}')
        return self._normalize_tokens(x, None if pad_mask is None else ~pad_mask)

    def _normalize_tokens(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Normalizes `x`; `valid` is None, or bool `x.shape[:-1]`, False where a token is padding."""
        return self._normalize(x)

    def _normalize(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if prefix + 'folded' in state_dict:
            raise RuntimeError(f'{prefix[:-1]}: this checkpoint is of a folded model, but this model has norms. First '
                               'call mmunorm.fuse_norms(model.eval()), or build the model with mmunorm.load_folded.')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return str(self.num_features)


def check_count(name: str, value: int, minimum: int) -> int:
    """Returns `value` if it is an int of at least `minimum`; else a ValueError that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f'{name} must be an int of at least {minimum}, got {value!r}')
    return value


def check_positive(name: str, value: float) -> float:
    """Returns `value` if it is positive; else a ValueError that names the argument."""
    if not value > 0:
        raise ValueError(f'{name} must be a positive number, got {value!r}')
    return value


def check_choice(name: str, value: str | bool, choices: Sequence[str | bool]) -> str | bool:
    """Returns `value` if it is one of `choices`; else a ValueError that lists them."""
    if value not in choices:
        raise ValueError(f'{name} must be one of {", ".join(map(repr, choices))}, got {value!r}')
    return value


DEFAULT_NORM_CFG = dict(type='UN')


def check_norm_cfg(norm_cfg: dict) -> dict:
    """Returns `norm_cfg` if it is a dict with a `type`; else a TypeError, or a KeyError if none is registered."""
    if not isinstance(norm_cfg, dict) or 'type' not in norm_cfg:
        raise TypeError(f"norm_cfg={norm_cfg!r}: must be a dict that names its type, such as dict(type='UN')")
    kind = norm_cfg['type']
    if registered(kind) is None:
        known = sorted(key for key, cls in MODELS.module_dict.items()
                       if isinstance(cls, type) and issubclass(cls, Norm))
        raise KeyError(f'norm_cfg: there is no norm {kind!r}{nearest(kind, MODELS.module_dict)} mmunorm has '
                       f'{", ".join(known)}')
    return norm_cfg
