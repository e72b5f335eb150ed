"""Averages over the records of the last M steps, and UN's outlier test (Eq. 18-19), as pure functions.

A record is `(M, C)`, oldest step first. No function synchronizes with the device.
"""
from __future__ import annotations

import torch
from torch import Tensor


def push(record: Tensor, newest: Tensor) -> Tensor:
    """The record with its oldest row dropped and `newest` `(C,)` appended, as a new tensor."""
    return torch.cat([record[1:], newest.unsqueeze(0)])


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
    # A product with a Python number would be five operations.
    return torch.sub(old, old, alpha=1 - alpha).add(new, alpha=1 - alpha)


def not_finite(values: Tensor) -> Tensor:
    """Where `values` are inf or NaN; a third of the operations of `~values.isfinite()`."""
    difference = values - values  # NaN for both
    return difference != difference


def finite_or(values: Tensor, otherwise: Tensor) -> Tensor:
    """`values`, with `otherwise` in place of inf and NaN."""
    return torch.where(not_finite(values), otherwise, values)


def root_variance(record: Tensor) -> Tensor:
    """`V(sqrt(record))` of Eq. 19, `()` float64, unbiased, over all `M * C` entries."""
    return record.double().sqrt().var(dim=(0, 1))  # in float32, squares overflow on a GPU and in compiled code


def is_outlier(omega: Tensor, omega_prev: Tensor, gm: Tensor) -> Tensor:
    """Whether any channel has `AM(omega) - GM(omega) > M * V(sqrt(omega_prev))` (Eq. 18-19), `()` bool.

    `omega` `(M, C)` ends with the newest statistics, `omega_prev` before them; `gm` is `geometric_mean(omega)`.
    """
    window = omega.shape[0]
    # Equal statistics have AM = GM and V = 0: there the rounding of exp and log must not decide.
    am = (omega * ((1 - 16 * torch.finfo(omega.dtype).eps) / window)).sum(dim=0)
    return (am > torch.add(gm, root_variance(omega_prev), alpha=window)).any()
