"""The per-channel part of an offline norm's step on a CPU, outside of compiled graphs, in NumPy.

A training step does some fifty operations on `(C,)` and `(M, C)`. Torch's calls cost several times what
they compute there, and NumPy's a fraction of torch's; a CPU also may look at a value and skip what a
step does not need. What is computed is `OfflineNorm._advance` and `OfflineNorm._average_unscaled`.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def takes(*tensors: Tensor) -> bool:
    """Whether these are ordinary CPU tensors of float32 or float64."""
    return not torch.compiler.is_compiling() and all(
        type(tensor) is Tensor and tensor.device.type == 'cpu' and
        tensor.dtype in (torch.float32, torch.float64) for tensor in tensors)


@np.errstate(all='ignore')  # as torch
def advance(norm, measured: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`OfflineNorm._advance`."""
    running = norm.running_var.numpy()
    s = _finite_or(measured.numpy(), running)
    averaged = settled = t.numpy() > norm._unsettled_steps
    outlier = omega = None
    if norm._keeps_activations:
        record = norm.activation_record.numpy()
        omega = _push(record.astype(s.dtype, copy=False), s)
    average = _average(norm, omega, s, running) if settled else None
    if norm.outlier_filter:
        outlier = settled and _is_outlier(norm, omega, record, average)
        averaged = settled and not outlier
        norm.num_outliers.numpy()[...] += outlier
    if norm._keeps_activations:
        record[...] = omega
        if outlier:
            record[-1] = running
    var_hat = s if average is None or not averaged else average
    newest = s if norm.forward_average in ('ema', 'earlier_ema') else var_hat
    running[...] = _moving_average(running, newest, norm.alpha)
    return (torch.from_numpy(s), torch.from_numpy(var_hat), None if outlier is None else _tensor(outlier),
            _tensor(averaged))


@np.errstate(all='ignore')  # as torch
def average_gradient(norm, step, g: Tensor) -> Tensor:
    """`OfflineNorm._average_unscaled` of a step of :func:`advance`."""
    measured, psi = g.numpy(), norm.psi.numpy()
    averaged, outlier = (flag is not None and flag.numpy() for flag in (step.averaged, step.outlier))
    g = _finite_or(measured, psi)
    recorded = g is measured
    target = psi if outlier else g
    if norm.backward_average == 'nu':
        used = psi.copy()
        z_squared = step.s.numpy() / (step.var_hat.numpy() + norm.eps)
        rate = 1 - norm.alpha
        new = _finite_or(used * (1 - rate * z_squared) + rate * g, used)
    else:
        if norm.backward_average == 'am':
            record = norm.gradient_record.numpy()
            pushed = _push(record.astype(g.dtype, copy=False), target)
            if recorded:
                record[...] = pushed
            target = _mean(pushed) if averaged else g
        new = used = _moving_average(psi, target, norm.alpha) if norm.backward_momentum else target
    if recorded and not outlier:
        psi[...] = new
    return torch.from_numpy(used if averaged else g)


def _tensor(flag: bool) -> Tensor:
    return torch.from_numpy(np.asarray(flag))


def _finite_or(values: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """`values` itself if all are finite."""
    finite = np.isfinite(values)
    return values if finite.all() else np.where(finite, values, otherwise).astype(values.dtype, copy=False)


def _push(record: np.ndarray, newest: np.ndarray) -> np.ndarray:
    return np.concatenate([record[1:], newest[None]])


def _mean(record: np.ndarray) -> np.ndarray:
    return np.add.reduce(record * record.dtype.type(1 / len(record)), axis=0)


def _moving_average(old: np.ndarray, new: np.ndarray, alpha: float) -> np.ndarray:
    return alpha * old + (1 - alpha) * new


def _average(norm, omega: np.ndarray | None, s: np.ndarray, running: np.ndarray) -> np.ndarray | None:
    if norm.forward_average == 'gm':
        return _geometric_mean(omega)
    if norm.forward_average == 'am':
        return _mean(omega)
    if norm.forward_average == 'ema':
        return _moving_average(running, s, norm.alpha)
    return running.astype(s.dtype) if norm.forward_average == 'earlier_ema' else None


def _geometric_mean(record: np.ndarray) -> np.ndarray:
    if len(record) == 1:
        return record[0]
    # A logarithm's rounding must not carry the largest float into infinity.
    return np.minimum(np.exp(_mean(np.log(record))), np.finfo(record.dtype).max)


def _is_outlier(norm, omega: np.ndarray, record: np.ndarray, average: np.ndarray | None) -> bool:
    """`averages.is_outlier`; `average` is the geometric mean if that is what the norm averages with."""
    gm = average if norm.forward_average == 'gm' else _geometric_mean(omega)
    am = _mean(omega) * omega.dtype.type(1 - 16 * np.finfo(omega.dtype).eps)
    roots = np.sqrt(record, dtype=omega.dtype)
    if norm.outlier_variance == 'channel':
        threshold = roots.var(axis=0, ddof=1) if len(roots) > 1 else np.nan
    elif roots.size > 1:
        deviations = (roots - roots.mean()).ravel()
        threshold = deviations.dot(deviations) / (roots.size - 1)
    else:
        threshold = np.nan  # as torch's variance of one number, which no excess is above
    return bool((am - gm - len(omega) * threshold).max() > 0)
