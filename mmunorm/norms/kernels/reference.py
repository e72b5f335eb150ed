"""What an offline norm computes, in plain torch: the reference for every other kernel.

Shapes: `x` and `dy` are `(..., C)`, every per-channel argument is `(C,)`, `valid` is None or a bool
tensor of shape `x.shape[:-1]`, True where a token counts. Per-channel results are in float32, or in
float64 for float64 input.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ..averages import (
    arithmetic_mean,
    finite_or,
    geometric_mean,
    is_outlier,
    moving_average,
    power_norm_nu,
    push,
)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the statistics of a tensor: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


# The compiler's code for a CPU goes down the column of a few channels, which is in no cache if it is long.
_COMPILED_ROWS = 32


def _sum_over_tokens(values: Tensor) -> Tensor:
    if values.dim() == 1:  # a single token
        return values
    if not (torch.compiler.is_compiling() and values.is_cpu):
        return values.sum(dim=tuple(range(values.dim() - 1)))
    values = values.flatten(0, -2)
    rest = len(values) % _COMPILED_ROWS
    total = values[:len(values) - rest].unflatten(0, (-1, _COMPILED_ROWS)).sum(dim=1).sum(dim=0)
    return total + values[len(values) - rest:].sum(dim=0) if rest else total


def _mean_over_tokens(values: Tensor, valid: Tensor | None) -> Tensor:
    """Mean over the valid tokens; NaN where there is none."""
    if valid is None:
        return _sum_over_tokens(values) / values.shape[:-1].numel()
    # `where`, because a padded token may hold inf or NaN, which a product with zero would keep.
    return _sum_over_tokens(torch.where(valid.unsqueeze(-1), values, 0)) / valid.sum()


def second_moment(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """`s = mean over tokens of x^2`, shape `(C,)` (spec section 3, forward step 1)."""
    return _mean_over_tokens(x.to(statistics_dtype(x.dtype)).square(), valid)


def variance_and_mean(x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Biased variance and mean over tokens, both `(C,)`.

    In two passes: in float32 `mean(x^2) - mean(x)^2` leaves nothing of a variance that is small beside them.
    """
    x = x.to(statistics_dtype(x.dtype))
    mean = _mean_over_tokens(x, valid)
    return _mean_over_tokens((x - mean).square(), valid), mean


def normalize_forward(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`y = scale * x + shift`, computed in the dtype of the statistics and rounded once to `x.dtype`."""
    return torch.addcmul(shift, x, scale).to(x.dtype)


def normalize_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None = None,
                       valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sums of the backward pass (Eq. 6-9) for `z = rstd * (x - mean)`, `y = weight * z + bias`.

    `mean` None is 0.

    Returns:
        `dweight = sum(dy * z)`, `dbias = sum(dy)` over all tokens, and the gradient statistics over valid
        tokens: `g`, the mean of `weight * dy * z`, and with a `mean` that of `weight * dy`, or None; each
        `(C,)`.
    """
    dtype = statistics_dtype(x.dtype)
    dy = dy.to(dtype)
    x = x.to(dtype)
    products = dy * (x if mean is None else x - mean)
    dweight, dbias = rstd * _sum_over_tokens(products), _sum_over_tokens(dy)
    if valid is None:
        count = products.shape[:-1].numel()
        return dweight, dbias, weight * dweight / count, None if mean is None else weight * dbias / count
    g = weight * rstd * _mean_over_tokens(products, valid)
    return dweight, dbias, g, None if mean is None else weight * _mean_over_tokens(dy, valid)


def normalize_input_gradient(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, psi: Tensor,
                             mean: Tensor | None = None, g_mean: Tensor | None = None,
                             eta: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    """`dx = (weight * dy - g_mean - z * psi) * rstd + eta * dy` (Eq. 9), with None for 0.

    A padded token has no part in the statistics: its `g_mean` and `psi` are 0.
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
    slope = psi * rstd.square().neg_()
    constant = None if mean is None else -g_mean * rstd - mean * slope
    return (direct if eta is None else direct + eta), slope, constant


def advance(measured: Tensor, t: Tensor, running_var: Tensor, record: Tensor | None,
            num_outliers: Tensor | None, average: str, per_channel: bool, unsettled: int,
            alpha: float) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Updates the state with a step's mean square (spec section 3, forward steps 2, 3 and 5).

    Args:
        measured: the mean square `(C,)`; where it is not finite, the running one counts.
        t: `()` number of the step, from 1; long.
        running_var: `(C,)`, changed in place.
        record: the last M statistics `(M, C)`, changed in place; None where none are kept.
        num_outliers: `()` long, changed in place; None without the outlier filter, which needs a record.
        average: of `OfflineNorm`'s `forward_average`.
        per_channel: V of Eq. 19 for each channel.
        unsettled: the steps that are not averaged, from the first.
        alpha: weight of the old value in moving averages.

    Returns:
        The mean square, finite, and `var_hat`, both `(C,)`; whether the step is an outlier, None without the
        filter, and whether it is averaged, both `()` bool.
    """
    s = finite_or(measured, running_var)
    averaged = settled = t > unsettled
    outlier = var_hat = omega = None
    if record is not None:
        omega_prev = record.to(s.dtype)
        omega = push(omega_prev, s)
    if average == 'gm':
        var_hat = geometric_mean(omega)
    elif average == 'am':
        var_hat = arithmetic_mean(omega)
    elif average == 'ema':
        var_hat = moving_average(running_var, s, alpha)
    elif average == 'earlier_ema':  # PowerNorm's, before this step
        var_hat = running_var.to(s.dtype, copy=True)
    if num_outliers is not None:
        outlier = settled & is_outlier(omega, omega_prev, per_channel, var_hat if average == 'gm' else None)
        averaged = settled ^ outlier  # an outlier step is a settled one
        num_outliers.add_(outlier)
    if record is not None:
        record.copy_(omega)
        if outlier is not None:
            record[-1].copy_(torch.where(outlier, running_var, s))
    var_hat = s if var_hat is None else torch.where(averaged, var_hat, s)
    # An EMA is the running statistic itself and must not be averaged twice.
    newest = s if average in ('ema', 'earlier_ema') else var_hat
    running_var.copy_(moving_average(running_var, newest, alpha))
    return s, var_hat, outlier, averaged


def average_gradient(g: Tensor, psi: Tensor, record: Tensor | None, outlier: Tensor | None, averaged: Tensor,
                     s: Tensor | None, var_hat: Tensor, average: str, momentum: bool, alpha: float,
                     eps: float) -> Tensor:
    """Updates the state with a step's gradient statistic (spec section 3, backward steps 2 to 4).

    Args:
        g: the statistic `(C,)`. If any of it is not finite, the state does not change.
        psi: `(C,)`, changed in place.
        record: the last M statistics `(M, C)`, changed in place; None unless `average` is 'am'.
        outlier, averaged, s, var_hat: of the same step's `advance`; `s` may be None unless `average` is 'nu'.
        average, momentum: `OfflineNorm`'s `backward_average` and `backward_momentum`.
        alpha: weight of the old value in moving averages.
        eps: added to the variance.

    Returns:
        The `psi` that is used in `dx`, `(C,)`.
    """
    finite = g.isfinite()
    # A gradient that overflows somewhere says nothing of this step; a gradient scaler skips it too.
    recorded = changes = finite.all()
    g = torch.where(finite, g, psi)
    target = g
    if outlier is not None:
        changes = recorded & ~outlier
        target = torch.where(outlier, psi, g)
    if average == 'nu':
        used = psi.clone()
        newest = finite_or(power_norm_nu(psi, s / (var_hat + eps), g, alpha), used)
    else:
        if average == 'am':
            before = record.to(g.dtype)
            after = push(before, target)
            record.copy_(torch.where(recorded, after, before))
            target = torch.where(averaged, arithmetic_mean(after), g)
        newest = used = moving_average(psi, target, alpha) if momentum else target
    psi.copy_(torch.where(changes, newest, psi))
    return torch.where(averaged, used, g)
