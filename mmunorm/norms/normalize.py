"""One training step of an offline norm as an autograd function: Eq. 4-9 for given averages."""
from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.autograd import Function, function

from . import kernels


def normalize(x: Tensor, weight: Tensor, bias: Tensor, var_hat: Tensor, mean: Tensor | None,
              eta: Tensor | None, valid: Tensor | None, eps: float,
              average_gradient: Callable[..., tuple[Tensor, Tensor | None]]) -> Tensor:
    """`y = weight * (x - mean) / sqrt(var_hat + eps) + bias + eta * x` with an estimated gradient (Eq. 4-9).

    Args:
        x: `(..., C)`, any floating dtype.
        weight, bias, var_hat: `(C,)`.
        mean: `(C,)`, or None for a method without one (mu = 0). It is taken for the current step's, with
            the exact gradient.
        eta: RepBN's `(1,)`, or None for 0.
        valid: None or bool `x.shape[:-1]`, False where a token is padding.
        eps: added to the variance.
        average_gradient: called once in the backward pass with this step's gradient statistics
            `g = mean(weight * dy * z)` `(C,)` and `g_mean = mean(weight * dy)` `(C,)`, None without a `mean`;
            returns the `psi` and `g_mean` that are used in `dx`.
    """
    return _Normalize.apply(x, weight, bias, var_hat, mean, eta, valid, eps, average_gradient)


def normalize_whole_step(x: Tensor, weight: Tensor, bias: Tensor, forward: Callable[..., tuple],
                         backward: Callable[..., tuple]) -> Tensor:
    """`normalize` where the statistics, too, are left to one call forward and one in the backward pass.

    Args:
        x: `(..., C)`, contiguous.
        weight, bias: `(C,)`.
        forward: called with `x`, `weight` and `bias`; returns `y`, `rstd` `(C,)` and anything.
        backward: called once with that, `dy`, `x`, `weight`, `rstd` and whether `dx` is wanted; returns `dx`
            or None, `dweight` and `dbias`.
    """
    return _NormalizeWholeStep.apply(x, weight, bias, forward, backward)


def once_differentiable(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """torch's, which takes a twentieth of a small step's time, only where a backward pass is recorded."""
    recorded = function.once_differentiable(backward)

    @wraps(backward)
    def choose(ctx, *grads):
        return recorded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return choose


class _Normalize(Function):

    @staticmethod
    def forward(ctx, x, weight, bias, var_hat, mean, eta, valid, eps, average_gradient):
        rstd = (var_hat + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd, mean, eta, valid)
        ctx.average_gradient = average_gradient
        return kernels.normalize_forward(x, *scale_and_shift(weight, bias, rstd, mean, eta))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight, rstd, mean, eta, valid = ctx.saved_tensors
        dy = dy.contiguous() if x.is_contiguous() else dy
        dx, dweight, dbias = gradients(dy, x, weight, rstd, mean, eta, valid, ctx.average_gradient,
                                       ctx.needs_input_grad[0])
        deta = None
        if eta is not None:
            products = dweight / rstd if mean is None else dweight / rstd + mean * dbias  # sum(dy * x)
            deta = products.sum().view(1).to(eta.dtype)
        return dx, dweight.to(weight.dtype), dbias.to(weight.dtype), None, None, deta, None, None, None


class _NormalizeWholeStep(Function):

    @staticmethod
    def forward(ctx, x, weight, bias, forward, backward):
        y, rstd, ctx.step = forward(x, weight, bias)
        ctx.save_for_backward(x, weight, rstd)
        ctx.backward_step = backward
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        grads = ctx.backward_step(ctx.step, dy.contiguous(), *ctx.saved_tensors, ctx.needs_input_grad[0])
        return *grads, None, None


def gradients(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None, eta: Tensor | None,
              valid: Tensor | None, average_gradient: Callable[..., tuple[Tensor, Tensor | None]],
              needs_dx: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """`dx`, None unless it is needed, `dweight` and `dbias`; arguments are those of `normalize`."""
    dweight, dbias, g, g_mean = kernels.normalize_backward(dy, x, weight, rstd, mean, valid)
    psi, g_mean = average_gradient(g, g_mean)
    dx = None
    if needs_dx:
        dx = kernels.normalize_input_gradient(dy, x, weight, rstd, psi, mean, g_mean, eta, valid)
    return dx, dweight, dbias


def scale_and_shift(weight: Tensor, bias: Tensor, rstd: Tensor, mean: Tensor | None,
                    eta: Tensor | None) -> tuple[Tensor, Tensor]:
    """`weight * (x - mean) * rstd + bias + eta * x` as `scale * x + shift`, two `(C,)` tensors (Eq. 1)."""
    scale = weight * rstd
    shift = bias if mean is None else torch.addcmul(bias, mean, scale, value=-1)
    return (scale if eta is None else scale + eta), shift
