"""What every norm of the package shares: checks of its arguments, and what folding asks for."""
from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn


class Norm(nn.Module):
    """A norm over tokens of shape `(..., C)`; subclasses give `_normalize`.

    A norm that can be folded has `affine()`; one that cannot says why in `fold_obstacle`, the rest of
    a sentence that begins with the norm's name. An obstacle wins over `affine()`. `num_features` is C; a ValueError if
    it is not a positive int.
    """
    # mmcv names layers by this; LN's name lets a model load an LN checkpoint's affine part.
    _abbr_ = 'ln'
    fold_obstacle: str = ''
    # Entries of a state_dict that only another kind of layer has, and what to do about them.
    refused_state: ClassVar[dict[str, str]] = {}

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = check_count('num_features', num_features, least=1)

    def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        """Normalizes `x`; returns the same shape and dtype.

        Args:
            x: `(..., C)`, any floating dtype. Statistics are computed in float32 (float64 for float64).
            pad_mask: bool, `x.shape[:-1]`, True where a token is padding: normalized as the others, but
                neither it nor a gradient that reaches it has a part in any statistic over tokens. Only
                training looks at it.

        Raises:
            ValueError, TypeError: the shape, or the dtype, of `x` or of `pad_mask` does not fit.
        """
        name = type(self).__name__
        if x.shape[-1:] != (self.num_features, ):
            raise ValueError(f'{name}: the last dimension of x must be num_features={self.num_features}, '
                             f'got x of shape {tuple(x.shape)}')
        if not x.is_floating_point():
            raise TypeError(f'{name}: x must be a floating tensor, got {x.dtype}')
        if pad_mask is not None and pad_mask.shape != x.shape[:-1]:
            raise ValueError(f'{name}: pad_mask must have the shape of x without channels, '
                             f'{tuple(x.shape[:-1])}, got {tuple(pad_mask.shape)}')
        if pad_mask is not None and pad_mask.dtype != torch.bool:
            raise TypeError(f'{name}: pad_mask must be bool, True where a token is padding, '
                            f'got {pad_mask.dtype}')
        return self._normalize(x, pad_mask)

    def _normalize(self, x: Tensor, pad_mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for key, why in self.refused_state.items():
            if prefix + key in state_dict:
                raise RuntimeError(f'{prefix[:-1]}: {why}')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def start_run(self, resumed: bool, steps: int) -> str:
        """To be called when a run begins that has so many training steps left: a warning for the user, or ''.

        A run that is `resumed` goes on from a checkpoint of its own.
        """
        return ''

    def set_progress(self, done: int, steps: int) -> None:
        """To be called before each training step of a run: how many steps are done, and how many it has."""

    def extra_repr(self) -> str:
        return str(self.num_features)


def call_norm(norm: nn.Module, x: Tensor, pad_mask: Tensor | None) -> Tensor:
    """`norm(x)`, with the pad mask if it is a norm of ours: the others have no statistic over tokens."""
    return norm(x, pad_mask) if pad_mask is not None and isinstance(norm, Norm) else norm(x)


def check_count(name: str, value: int, least: int) -> int:
    """`value` if it is an int of at least `least`; a ValueError that names the argument if not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f'{name} must be an int of at least {least}, got {value!r}')
    return value


def check_eps(eps: float) -> float:
    """`eps` if it is positive; a ValueError if not."""
    if not eps > 0:
        raise ValueError(f'eps must be a positive number, got {eps!r}')
    return eps


def check_choice(name: str, value: str | bool, choices: Sequence[str | bool]) -> str | bool:
    """`value` if it is one of `choices`; a ValueError that lists them if not."""
    if value not in choices:
        raise ValueError(f'{name} must be one of {", ".join(map(repr, choices))}, got {value!r}')
    return value


def check_norm_cfg(norm_cfg: dict) -> dict:
    """`norm_cfg` if it is a dict with a `type`; a TypeError if not."""
    if not isinstance(norm_cfg, dict) or 'type' not in norm_cfg:
        raise TypeError(f"norm_cfg={norm_cfg!r}: must be a dict that names its type, such as dict(type='UN')")
    return norm_cfg
