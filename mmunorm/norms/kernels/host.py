"""UN's own averages over steps on a CPU, in numpy on the memory of the tensors.

A step has some forty operations on vectors of C numbers, each of which takes several times as long in torch. Here
decisions are no tensors, because a CPU need not wait for its numbers. The functions are those of `triton`.
"""
from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

_ignoring_errors = np.errstate(all='ignore')  # inf and NaN are found by their values


@_ignoring_errors
def average_activation(total: Tensor, count: int | Tensor, t: Tensor, running_var: Tensor, record: Tensor,
                       num_outliers: Tensor | None, unsettled: int, alpha: float,
                       eps: float) -> tuple[Tensor, bool, bool | None, Tensor]:
    """`OfflineNorm._average_activation` of the statistics `total / count`; it averages after `unsettled` steps.

    Returns `1 / sqrt(var_hat + eps)`, `averaged`, `outlier` and the statistics. Updates `t`, `running_var`, `record`,
    and `num_outliers`, None without the filter.
    """
    running, omega, steps = running_var.numpy(), record.numpy(), t.numpy()
    steps += 1
    averaged, outlier = bool(steps > unsettled), False
    measured = var_hat = total.numpy() / _number(count)
    if not math.isfinite(np.dot(var_hat, var_hat)):
        var_hat = np.where(np.isfinite(var_hat), var_hat, running)
    threshold = len(omega) * _root_variance(omega) if averaged and num_outliers is not None else np.inf
    _push(omega, var_hat)
    if averaged:
        mean, largest = _mean(len(omega), omega.dtype), np.finfo(omega.dtype).max
        gm = np.minimum(np.exp(mean @ np.log(omega)), largest) if len(omega) > 1 else var_hat
        # Eq. 18. Rounding must not count as a difference between the means.
        outlier = bool((mean @ omega * (1 - 16 * np.finfo(omega.dtype).eps) - gm).max() > threshold)
        if outlier:
            omega[-1] = running
            number = num_outliers.numpy()
            number += 1
        else:
            var_hat = gm
    _move(running, alpha, var_hat)
    rstd = 1 / np.sqrt(var_hat + eps)
    return (torch.from_numpy(rstd), averaged and not outlier, None if num_outliers is None else outlier,
            torch.from_numpy(measured))


@_ignoring_errors
def average_gradient(total: Tensor, count: int | Tensor, scale: Tensor, rstd: Tensor, psi: Tensor, record: Tensor,
                     outlier: bool | None, averaged: bool, alpha: float, loss_scale: Tensor | None) -> Tensor:
    """`OfflineNorm._update_psi` of the statistics `scale * total / count`: the `psi * rstd^2` `(C,)` of `dx`.

    Updates `psi` and `record` `(M, C)`, which do not contain the loss scale.
    """
    kept, gradients = psi.numpy(), record.numpy()
    factor = 1 if loss_scale is None else _number(loss_scale)
    g = scale.numpy() * total.numpy() / (_number(count) * factor)
    mean = _mean(len(gradients), gradients.dtype)
    if math.isfinite(np.dot(g, g)) or np.isfinite(g).all():  # the first takes less time, and may overflow
        _push(gradients, kept if outlier else g)
        if not outlier:
            _move(kept, alpha, mean @ gradients if averaged else g)
        used = kept if averaged else g
    else:  # changes no state
        used = np.where(np.isfinite(g), g, kept)
        if averaged:
            used = alpha * kept + (1 - alpha) * (mean @ np.concatenate([gradients[1:], used[None]]))
    r = rstd.numpy()
    return torch.from_numpy(used * r * r if loss_scale is None else used * factor * r * r)


def _number(value: int | Tensor) -> int | float:
    return value.numpy().item() if isinstance(value, Tensor) else value


@cache
def _mean(steps: int, dtype: np.dtype) -> np.ndarray:
    """The weights of a mean over steps: a product with them takes less time than `mean`."""
    return np.full(steps, 1 / steps, dtype)


def _push(record: np.ndarray, newest: np.ndarray) -> None:
    record[:-1] = record[1:]
    record[-1] = newest


def _move(average: np.ndarray, alpha: float, newest: np.ndarray) -> None:
    """Eq. 12, in place."""
    average *= alpha
    average += (1 - alpha) * newest


def _root_variance(record: np.ndarray) -> float:
    """V of Eq. 19. In float64, the sums of squares neither overflow nor cancel by more than Eq. 18 allows."""
    roots = np.sqrt(record, dtype=np.float64).ravel()
    total = roots.sum().item()
    return (np.dot(roots, roots).item() - total * total / len(roots)) / (len(roots) - 1 or np.nan)
