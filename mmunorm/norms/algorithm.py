"""Algorithm 2 of the paper (arXiv 2208.01313) from top to bottom: one training step of an offline norm.

Tokens are `x` `(..., C)`; everything else is `(C,)`, one number a channel. `norm` is an :class:`.OfflineNorm`: its
settings choose the averages over steps (Theta in Eq. 2-9), its buffers are the state that goes from step to step.
UN's averages are 'gm' forward, 'am' with momentum backward, and its outlier filter. Steps are numbered as in the
project's docs/paper_to_code.md, which also finds each equation. On a GPU `kernels` computes the same in Triton.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from . import kernels
from .averages import (
    arithmetic_mean,
    bessel_correction,
    finite_or,
    geometric_mean,
    is_outlier,
    moving_average,
    power_norm_nu,
    push,
)


class Step(NamedTuple):
    """What the forward pass of one training step measured and decided. None: the norm has no use for it."""
    var_hat: Tensor  # (C,)
    averaged: Tensor  # () bool: out of the warm-up, and no outlier
    outlier: Tensor | None = None  # () bool: the step drops every average
    s: Tensor | None = None  # (C,) the statistic, finite; of PowerNorm
    mean: Tensor | None = None  # (C,) mu_hat; of a centered norm
    share: Tensor | None = None  # () this process's part of all tokens; of a synchronized norm
    t: Tensor | None = None  # () number of the step, from 1; of PRepBN
    measured: Tensor | None = None  # what `measure` returned, of this process alone


def measure(x: Tensor, valid: Tensor | None, centered: bool | str) -> Tensor:
    """Forward 1: statistics over tokens, `s` `(1, C)`; with `centered` variance and mean `(2, C)`."""
    if centered:
        return torch.stack(kernels.variance_and_mean(x, valid))
    return kernels.second_moment(x, valid).unsqueeze(0)  # s_t = mean of x^2


def average_activation(norm, measured: Tensor, tokens: int | Tensor | None) -> Step:
    """Forward 2, 3 and 5: updates the state with what `measure` returned; `tokens` is how many it was over.

    A channel whose statistic is not finite takes the running one in its place.
    """
    t, running, record, alpha = norm.num_batches_tracked, norm.running_var, norm.activation_record, norm.alpha
    mean = outlier = average = None
    if norm.centered == 'frozen':  # mu_hat is a constant
        mean = norm.running_mean.to(measured.dtype)
        measured = (measured[0] + (measured[1] - mean).square()).unsqueeze(0)  # the mean square about it
    elif norm.centered:  # mu_hat is the mean of this step
        mean = torch.where(measured[0].isfinite(), measured[1], norm.running_mean)
        norm.running_mean.copy_(moving_average(norm.running_mean, mean, alpha))  # 5. Eq. 12
    if norm.has_own_kernels and (launch := kernels.one_launch(record, measured[0], running)):
        results = launch.average_activation(measured[0], t, running, record, norm.num_outliers, norm.unsettled, alpha)
        return Step(*results, mean=mean)
    s = finite_or(measured[0], running)
    averaged = t > norm.unsettled  # 2. the warm-up is over, and M statistics were recorded before this one
    if record is not None:
        omega_prev = record.to(s.dtype)
        omega = push(omega_prev, s)
    if norm.forward_average == 'gm':  # UN
        average = geometric_mean(omega)
    elif norm.forward_average == 'am':
        average = arithmetic_mean(omega)
    elif norm.forward_average == 'ema':  # MABN
        average = moving_average(running, s, alpha)
    elif norm.forward_average == 'earlier_ema':  # PowerNorm
        average = running.to(s.dtype, copy=True)
    if norm.outlier_filter:  # 3. Eq. 18-19
        gm = average if norm.forward_average == 'gm' else None
        outlier = averaged & is_outlier(omega, omega_prev, norm.outlier_variance == 'channel', gm)
        averaged = averaged & ~outlier
        norm.num_outliers.add_(outlier)
    var_hat = s if average is None else torch.where(averaged, average, s)  # Eq. 3
    if record is not None:
        record.copy_(omega if outlier is None else push(omega_prev, torch.where(outlier, running, s)))
    newest = var_hat
    if norm.forward_average in ('ema', 'earlier_ema'):  # the running statistic itself: not averaged twice
        newest = s
    elif norm.keeps_unbiased:  # TokenBN, as torch's BatchNorm
        newest = finite_or(measured[0] * bessel_correction(tokens), running)
    running.copy_(moving_average(running, newest, alpha))  # 5. Eq. 12
    return Step(var_hat, averaged, outlier, s if norm.backward_average == 'nu' else None, mean)


def normalize(x: Tensor, weight: Tensor, bias: Tensor, step: Step, eta: Tensor | None, valid: Tensor | None,
              eps: float, average_gradient: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]):
    """Forward 4 with its estimated gradient: `weight * (x - mean) / sqrt(var_hat + eps) + bias + eta * x`.

    `eta` is `(1,)`, or None for 0; `valid` None or bool `x.shape[:-1]`, False where a token is padding. The backward
    pass calls `average_gradient` once with the statistics `g = mean(weight * dy * z)` and `mean(weight * dy)`, None
    without a mean; it returns the two that are used in `dx`.
    """
    return _Normalize.apply(x, weight, bias, step.var_hat, step.mean, eta, valid, eps, average_gradient)


class _Normalize(Function):

    @staticmethod
    def forward(ctx, x, weight, bias, var_hat, mean, eta, valid, eps, average_gradient):
        rstd = (var_hat + eps).rsqrt()
        # Detached: before 2.5 or so a parameter that is saved here loses its hooks in a checkpoint.
        ctx.save_for_backward(x, weight.detach(), rstd, mean, eta, valid)
        ctx.average_gradient = average_gradient
        return kernels.affine(x, *scale_and_shift(weight, bias, rstd, mean, eta))  # 4. Eq. 4-5

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight, rstd, mean, eta, valid = ctx.saved_tensors
        dy = dy.contiguous() if x.is_contiguous() else dy
        # 1. dgamma, dbeta, and the statistics g_var and g_mu of the gradient (Eq. 6-9)
        dweight, dbias, g, g_mean = kernels.gradient_statistics(dy, x, weight, rstd, mean, valid)
        psi, g_mean = ctx.average_gradient(g, g_mean)  # 2 to 4
        dx = deta = None
        if ctx.needs_input_grad[0]:  # 5. Eq. 9
            dx = kernels.input_gradient(dy, x, weight, rstd, psi, mean, g_mean, eta, valid)
        if eta is not None:
            products = dweight / rstd if mean is None else dweight / rstd + mean * dbias  # sum(dy * x)
            deta = products.sum().view(1).to(eta.dtype)
        return dx, dweight.to(weight.dtype), dbias.to(weight.dtype), None, None, deta, None, None, None


def scale_and_shift(weight: Tensor, bias: Tensor, rstd: Tensor, mean: Tensor | None,
                    eta: Tensor | None) -> tuple[Tensor, Tensor]:
    """`weight * (x - mean) * rstd + bias + eta * x` as `scale * x + shift` (Eq. 1), two `(C,)` tensors."""
    scale = weight * rstd
    shift = bias if mean is None else torch.addcmul(bias, mean, scale, value=-1)
    return (scale if eta is None else scale + eta), shift


def average_gradient(norm, step: Step, g: Tensor) -> Tensor:
    """Backward 2 to 4: updates the state; the `psi` that is used in `dx`.

    A gradient that overflows anywhere is useless, and a gradient scaler skips its step: the state is kept as it is.
    """
    psi, record = norm.psi, norm.gradient_record
    if norm.has_own_kernels and (launch := kernels.one_launch(record, g, psi)):
        return launch.average_gradient(g, psi, record, step.outlier, step.averaged, norm.alpha)
    finite = g.isfinite()
    recorded = changes = finite.all()
    g = torch.where(finite, g, psi)
    target = g
    if step.outlier is not None:  # 4. records psi in place of g, and keeps psi
        changes = recorded & ~step.outlier
        target = torch.where(step.outlier, psi, g)
    if norm.backward_average == 'nu':  # PowerNorm
        used = psi.clone()
        z_squared = step.s / (step.var_hat + norm.eps)
        newest = finite_or(power_norm_nu(psi, z_squared, g, norm.alpha), used)
    else:
        if norm.backward_average == 'am':  # 3. UN, MABN
            before = record.to(g.dtype)
            after = push(before, target)
            record.copy_(torch.where(recorded, after, before))
            target = torch.where(step.averaged, arithmetic_mean(after), g)
        newest = used = moving_average(psi, target, norm.alpha) if norm.backward_momentum else target
    psi.copy_(torch.where(changes, newest, psi))
    return torch.where(step.averaged, used, g)  # 2. in the warm-up and on an outlier step: the exact gradient
