"""Reductions and elementwise passes of an offline norm in plain torch: the reference for every other kernel.

Shapes: `x` and `dy` are `(..., C)`, every per-channel argument is `(C,)`, `valid` is None or a bool
tensor of shape `x.shape[:-1]`, True where a token counts. Per-channel results are in float32, or in
float64 for float64 input.
"""
from __future__ import annotations

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the statistics of a tensor: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _sum_over_tokens(values: Tensor) -> Tensor:
    # torch reads an empty `dim` as all dimensions; `(C,)` is a single token.
    return values.sum(dim=tuple(range(values.dim() - 1))) if values.dim() > 1 else values


def _mean_over_tokens(values: Tensor, valid: Tensor | None) -> Tensor:
    """Mean over the valid tokens; NaN where there is none."""
    if valid is None:
        return _sum_over_tokens(values) / values.shape[:-1].numel()
    # `where`, because a padded token may hold inf or NaN, which a product with zero would keep.
    return _sum_over_tokens(torch.where(valid.unsqueeze(-1), values, 0)) / valid.sum()


def second_moment(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """`s = mean over tokens of x^2`, shape `(C,)` (spec section 3, forward step 1)."""
    return _mean_over_tokens(x.to(statistics_dtype(x.dtype)).square(), valid)


def normalize_forward(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`y = scale * x + shift`, computed in the dtype of the statistics and rounded once to `x.dtype`."""
    return torch.addcmul(shift, x, scale).to(x.dtype)


def normalize_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor,
                       valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the backward pass (Eq. 6-9) for `z = rstd * x`, `y = weight * z + bias`.

    Returns:
        `dweight = sum(dy * z)`, `dbias = sum(dy)` over all tokens, and the gradient statistic
        `g = mean over valid tokens of weight * dy * z`, each `(C,)`.
    """
    dtype = statistics_dtype(x.dtype)
    dy = dy.to(dtype)
    products = dy * x.to(dtype)
    dweight = rstd * _sum_over_tokens(products)
    if valid is None:
        g = weight * dweight / products.shape[:-1].numel()
    else:
        g = weight * rstd * _mean_over_tokens(products, valid)
    return dweight, _sum_over_tokens(dy), g


def normalize_input_gradient(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, psi: Tensor,
                             valid: Tensor | None = None) -> Tensor:
    """`dx = (weight * dy - z * psi) * rstd` (Eq. 9); a padded token has no part in the statistic."""
    through_statistic = x * (psi * rstd.square())
    if valid is not None:
        through_statistic = torch.where(valid.unsqueeze(-1), through_statistic, 0)
    return (dy * (weight * rstd) - through_statistic).to(x.dtype)
