"""Averages over the records of the last M steps, PowerNorm's nu and UN's outlier test (Eq. 18-19), as pure
functions.

A record is `(M, C)`, oldest step first. No function synchronizes with the device.
"""
from __future__ import annotations

import torch
from torch import Tensor


def push(record: Tensor, newest: Tensor) -> Tensor:
    """The record with its oldest row dropped and `newest` `(C,)` appended, as a new tensor."""
    return torch.cat([record[1:], newest.unsqueeze(0).to(record.dtype)])


def arithmetic_mean(record: Tensor) -> Tensor:
    """AM over the steps, `(C,)`; finite where the record is."""
    return (record * (1 / record.shape[0])).sum(dim=0)


def geometric_mean(record: Tensor) -> Tensor:
    """GM over the steps, `exp(mean(log))`, `(C,)`; 0 where a step holds 0."""
    if record.shape[0] == 1:  # without the rounding of exp and log
        return record[0]
    # The rounding of a logarithm must not turn the largest float into infinity.
    return record.log().mean(dim=0).exp().clamp(max=torch.finfo(record.dtype).max)


def moving_average(old: Tensor, new: Tensor, alpha: float) -> Tensor:
    """`alpha * old + (1 - alpha) * new` (Eq. 12): `alpha` weighs the OLD value; finite where both are."""
    return torch.add(alpha * old, new, alpha=1 - alpha)


def bessel_correction(tokens: int | Tensor) -> float | Tensor:
    """`n / (n - 1)` for n tokens, which makes a biased variance unbiased; 1 for a single one, or none."""
    if isinstance(tokens, Tensor):
        return tokens.clamp(min=1) / (tokens - 1).clamp(min=1)
    return max(tokens, 1) / max(tokens - 1, 1)


def power_norm_nu(nu: Tensor, z_squared: Tensor, g: Tensor, alpha: float) -> Tensor:
    """PowerNorm's next `nu` `(C,)` (Shen et al., ICML 2020, Algorithm 2).

    `z_squared` is the mean over tokens of the normalized input squared, `g` the mean of its gradient times it.
    """
    return nu * (1 - (1 - alpha) * z_squared) + (1 - alpha) * g


def finite_or(values: Tensor, otherwise: Tensor) -> Tensor:
    """`values`, with `otherwise` in place of inf and NaN."""
    nothing = values - values  # NaN for both; half the cost of `isfinite`
    return torch.where(nothing == nothing, values, otherwise)


def root_variance(record: Tensor) -> Tensor:
    """`V(sqrt(record))` of Eq. 19, `()`, unbiased, over all `M * C` entries."""
    roots = record.sqrt().double()  # in float32, squares overflow on a GPU and in compiled code
    return roots.var().to(record.dtype)


def is_outlier(omega: Tensor, omega_prev: Tensor, gm: Tensor) -> Tensor:
    """Whether any channel has `AM(omega) - GM(omega) > M * V(sqrt(omega_prev))` (Eq. 18-19), `()` bool.

    `omega` `(M, C)` ends with the newest statistics, `omega_prev` before them; `gm` is `geometric_mean(omega)`.
    """
    # Equal statistics have AM = GM and V = 0: there the rounding of exp and log must not decide.
    am = arithmetic_mean(omega) * (1 - 16 * torch.finfo(omega.dtype).eps)
    threshold = torch.add(gm, root_variance(omega_prev), alpha=omega.shape[0])
    return (am - threshold).amax() > 0
