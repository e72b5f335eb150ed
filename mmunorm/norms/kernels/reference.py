"""The passes over tokens in plain torch: the reference for every other kernel.

`x` and `dy` are `(..., C)`, every per-channel argument is `(C,)`, `valid` is None or a bool tensor of shape
`x.shape[:-1]`, True where a token counts. Per-channel results are in float32, or in float64 for float64 input.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ...compat import is_compiling


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the statistics of a tensor: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def num_tokens(values: Tensor) -> int:
    """Number of tokens. (Older releases cannot compile `shape[:-1].numel()`.)"""
    return values.numel() // values.shape[-1]


# Compiled code for a CPU sums down the column of a few channels. A short column stays in the cache.
_COMPILED_ROWS = 32


def _sum_over_tokens(values: Tensor) -> Tensor:
    if values.dim() == 1:  # a single token
        return values
    if not (is_compiling() and values.device.type == 'cpu'):
        return values.sum(dim=tuple(range(values.dim() - 1)))
    values = values.flatten(0, -2)
    rest = len(values) % _COMPILED_ROWS
    total = values[:len(values) - rest].unflatten(0, (-1, _COMPILED_ROWS)).sum(dim=1).sum(dim=0)
    return total + values[len(values) - rest:].sum(dim=0) if rest else total


def _mean_over_tokens(values: Tensor, valid: Tensor | None) -> Tensor:
    """Mean over the valid tokens; NaN if there are none."""
    if valid is None:
        return _sum_over_tokens(values) / num_tokens(values)
    # `where`, because a padded token may hold inf or NaN, which a product with zero would keep.
    return _sum_over_tokens(torch.where(valid.unsqueeze(-1), values, 0)) / valid.sum()


def second_moment(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """`s = mean over tokens of x^2`, `(C,)`."""
    return _mean_over_tokens(x.to(statistics_dtype(x.dtype)).square(), valid)


def variance_and_mean(x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Biased variance and mean over tokens, both `(C,)`.

    In two passes: in float32 `mean(x^2) - mean(x)^2` cancels if the variance is small compared with the mean.
    """
    x = x.to(statistics_dtype(x.dtype))
    mean = _mean_over_tokens(x, valid)
    return _mean_over_tokens((x - mean).square(), valid), mean


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`scale * x + shift`, computed in the dtype of the statistics and rounded once to `x.dtype`."""
    return torch.addcmul(shift, x, scale).to(x.dtype)


def gradient_statistics(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None = None,
                        valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sums of the backward pass for `z = rstd * (x - mean)` and `y = weight * z + bias`; without `mean`, it is 0.

    Returns:
        `dweight = sum(dy * z)` and `dbias = sum(dy)` over all tokens. Over the valid tokens: `g`, the mean of
        `weight * dy * z`, and the mean of `weight * dy`, None without a `mean`. Each is `(C,)`.
    """
    dtype = statistics_dtype(x.dtype)
    dy = dy.to(dtype)
    x = x.to(dtype)
    products = dy * (x if mean is None else x - mean)
    dweight, dbias = rstd * _sum_over_tokens(products), _sum_over_tokens(dy)
    if valid is None:
        count = num_tokens(products)
        return dweight, dbias, weight * dweight / count, None if mean is None else weight * dbias / count
    g = weight * rstd * _mean_over_tokens(products, valid)
    return dweight, dbias, g, None if mean is None else weight * _mean_over_tokens(dy, valid)


def input_gradient(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, psi: Tensor,
                   mean: Tensor | None = None, g_mean: Tensor | None = None, eta: Tensor | None = None,
                   valid: Tensor | None = None) -> Tensor:
    """`dx = (weight * dy - g_mean - z * psi) * rstd + eta * dy` (Eq. 9), with None for 0.

    A padded token is not part of the statistics: its `g_mean` and `psi` are 0.
    """
    direct, slope, constant = input_gradient_terms(weight, rstd, psi, mean, g_mean, eta)
    through_statistics = x * slope if constant is None else torch.addcmul(constant, x, slope)
    if valid is not None:
        through_statistics = torch.where(valid.unsqueeze(-1), through_statistics, 0)
    return torch.addcmul(through_statistics, dy, direct).to(x.dtype)


def input_gradient_terms(weight: Tensor, rstd: Tensor, psi: Tensor, mean: Tensor | None,
                         g_mean: Tensor | None, eta: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Eq. 9 as `dx = direct * dy + slope * x + constant`, each `(C,)`; None is 0."""
    direct = weight * rstd
    slope = -psi * rstd.square()
    constant = None if mean is None else -g_mean * rstd - mean * slope
    return (direct if eta is None else direct + eta), slope, constant
