"""The passes over tokens in plain torch: the reference for every other kernel.

`x` and `dy` are `(..., C)`, every per-channel argument is `(C,)`, `valid` is None or a bool tensor of shape
`x.shape[:-1]`, True where a token counts. Per-channel results are in float32, or in float64 for float64 input.
"""
from __future__ import annotations

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the statistics of a tensor: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values.to(dtype)`, which takes time where there is nothing to do."""
    return values if values.dtype == dtype else values.to(dtype)


def num_tokens(values: Tensor) -> int:
    """Number of tokens. (Older releases cannot compile `shape[:-1].numel()`.)"""
    return values.numel() // values.shape[-1]


def _sum_over_tokens(values: Tensor) -> Tensor:
    if values.dim() == 1:  # a single token
        return values
    return values.sum(dim=tuple(range(values.dim() - 1)))


def _over_valid(values: Tensor, valid: Tensor | None) -> Tensor:
    """The values, 0 where a token is padding: it may hold inf or NaN, which a product with zero would keep."""
    return values if valid is None else torch.where(valid.unsqueeze(-1), values, 0)


def _mean_over_tokens(values: Tensor, valid: Tensor | None) -> Tensor:
    """Mean over the valid tokens; NaN if there are none."""
    count = num_tokens(values) if valid is None else valid.sum()
    return _sum_over_tokens(_over_valid(values, valid)) / count


def second_moment(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """`s`, the mean of x^2 over the valid tokens, `(C,)`."""
    x = _to(x, statistics_dtype(x.dtype))
    return _mean_over_tokens(x * x, valid)


def variance_and_mean(x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Biased variance and mean over tokens, both `(C,)`.

    In two passes: in float32 `mean(x^2) - mean(x)^2` cancels if the variance is small compared with the mean.
    """
    x = x.to(statistics_dtype(x.dtype))
    mean = _mean_over_tokens(x, valid)
    return _mean_over_tokens((x - mean).square(), valid), mean


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`scale * x + shift`, computed in the dtype of the statistics and rounded once to `x.dtype`."""
    return _to(torch.addcmul(shift, x, scale), x.dtype)


def gradient_sums(dy: Tensor, x: Tensor, rstd: Tensor, mean: Tensor | None = None,
                  valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The sums of `dy * z` and `dy` over all tokens, and the means of both over the valid ones; `(C,)` each.

    `z = (x - mean) * rstd`; without `mean`, it is 0, and the mean of `dy` is None.
    """
    dy = _to(dy, statistics_dtype(x.dtype))
    products = dy * (x if mean is None else x - mean)
    sums = rstd * _sum_over_tokens(products), _sum_over_tokens(dy)
    if valid is None:
        count = num_tokens(x)
        return *sums, sums[0] / count, None if mean is None else sums[1] / count
    return *sums, rstd * _mean_over_tokens(products, valid), None if mean is None else _mean_over_tokens(dy, valid)


def input_gradient(dy: Tensor, x: Tensor, direct: Tensor, psi: Tensor, rstd: Tensor, constant: Tensor | None = None,
                   valid: Tensor | None = None) -> Tensor:
    """`dx = direct * dy - psi * rstd^2 * x + constant` (Eq. 9), `direct * dy` where a token is padding.

    Without `constant`, it is 0.
    """
    slope = psi * (rstd * rstd)
    if constant is None and valid is None:
        return _to((dy * direct).addcmul_(x, slope, value=-1), x.dtype)
    through_statistics = x * -slope if constant is None else torch.addcmul(constant, x, slope, value=-1)
    return _over_valid(through_statistics, valid).addcmul_(dy, direct).to(x.dtype)
