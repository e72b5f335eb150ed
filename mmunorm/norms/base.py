"""What every offline norm shares: parameters, running statistics, inference (Eq. 1) and the training pass."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import kernels


class _Normalize(Function):
    """Eq. 4-9 for given `var_hat`: what the backward average answers takes the gradient statistic's place."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, var_hat: Tensor, valid: Tensor | None,
                eps: float, average_gradient: Callable[[Tensor], Tensor]) -> Tensor:
        rstd = (var_hat + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd, valid)
        ctx.average_gradient = average_gradient
        return kernels.normalize_forward(x, weight * rstd, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight, rstd, valid = ctx.saved_tensors
        dweight, dbias, g = kernels.normalize_backward(dy, x, weight, rstd, valid)
        psi = ctx.average_gradient(g)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = kernels.normalize_input_gradient(dy, x, weight, rstd, psi, valid)
        return dx, dweight.to(weight.dtype), dbias.to(weight.dtype), None, None, None, None


def normalize(x: Tensor, weight: Tensor, bias: Tensor, var_hat: Tensor, valid: Tensor | None, eps: float,
              average_gradient: Callable[[Tensor], Tensor]) -> Tensor:
    """`y = weight * x / sqrt(var_hat + eps) + bias` with an estimated gradient (Eq. 4-9).

    Args:
        x: `(..., C)`, any floating dtype.
        weight, bias, var_hat: `(C,)`.
        valid: None or bool `x.shape[:-1]`, False where a token is padding.
        eps: added to the variance.
        average_gradient: called once in the backward pass with this step's gradient statistic
            `g = mean(weight * dy * z)` `(C,)`; returns the `psi` `(C,)` that is used in `dx`.
    """
    return _Normalize.apply(x, weight, bias, var_hat, valid, eps, average_gradient)


class OfflineNorm(nn.Module):
    """A norm with fixed statistics at inference: `y = gamma * (x - mu) / sqrt(var + eps) + beta` (Eq. 1).

    Subclasses give `_training_step`. State: parameters `weight` (gamma) and `bias` (beta), buffers
    `running_var` and `num_batches_tracked` (training steps seen); all `(C,)` but the last.

    Args:
        num_features (int): C.
        eps (float): added to the variance. Defaults to 1e-5.
        alpha (float): weight of the OLD value in moving averages, in [0, 1). Defaults to 0.9.

    Raises:
        ValueError: an argument is out of its range.
    """
    # mmcv names layers by this; LN's name lets a model load an LN checkpoint's affine part.
    _abbr_ = 'ln'

    def __init__(self, num_features: int, eps: float = 1e-5, alpha: float = 0.9):
        super().__init__()
        self.num_features = check_count('num_features', num_features, least=1)
        if not eps > 0:
            raise ValueError(f'eps must be a positive number, got {eps!r}')
        if not 0 <= alpha < 1:
            raise ValueError('alpha must be in [0, 1), the weight of the old value (0.9 keeps 90 % of it), '
                             f'got {alpha!r}')
        self.eps = eps
        self.alpha = alpha
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer('running_var', torch.ones(num_features))
        self.register_buffer('num_batches_tracked', torch.tensor(0, dtype=torch.long))

    def affine(self) -> tuple[Tensor, Tensor]:
        """The norm at inference as `y = scale * x + shift` (spec section 4): two `(C,)` float64 tensors."""
        scale, shift = self._affine(torch.float64)
        return scale.detach(), shift.detach()

    def _affine(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rstd = (self.running_var.to(dtype) + self.eps).rsqrt()
        return self.weight.to(dtype) * rstd, self.bias.to(dtype)

    def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        """Normalizes `x`.

        Args:
            x: `(..., C)`, any floating dtype. Statistics are computed in float32 (float64 for float64).
            pad_mask: bool, `x.shape[:-1]`, True where a token is padding: normalized as the others, but
                neither it nor a gradient that reaches it has a part in any statistic. Only training
                looks at it.

        Returns:
            Same shape and dtype as `x`.

        Raises:
            ValueError: the shape of `x` or of `pad_mask` does not fit.
            TypeError: the dtype of `x` or of `pad_mask` does not fit.
        """
        self._check_input(x, pad_mask)
        if not self.training or x.numel() == 0:
            return kernels.normalize_forward(x, *self._affine(kernels.statistics_dtype(x.dtype)))
        return self._training_step(x, None if pad_mask is None else ~pad_mask)

    def _training_step(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """One training step on a non-empty `x`; `valid` is the inverse of `pad_mask`."""
        raise NotImplementedError

    def _check_input(self, x: Tensor, pad_mask: Tensor | None) -> None:
        name = type(self).__name__
        if x.dim() == 0 or x.shape[-1] != self.num_features:
            raise ValueError(f'{name}: the last dimension of x must be num_features={self.num_features}, '
                             f'got x of shape {tuple(x.shape)}')
        if not x.is_floating_point():
            raise TypeError(f'{name}: x must be a floating tensor, got {x.dtype}')
        if pad_mask is None:
            return
        if pad_mask.shape != x.shape[:-1]:
            raise ValueError(f'{name}: pad_mask must have the shape of x without channels, '
                             f'{tuple(x.shape[:-1])}, got {tuple(pad_mask.shape)}')
        if pad_mask.dtype != torch.bool:
            raise TypeError(f'{name}: pad_mask must be bool, True where a token is padding, '
                            f'got {pad_mask.dtype}')

    def extra_repr(self) -> str:
        return f'{self.num_features}, eps={self.eps}, alpha={self.alpha}'


def check_count(name: str, value: int, least: int) -> int:
    """`value` if it is an int of at least `least`; a ValueError that names the argument if not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f'{name} must be an int of at least {least}, got {value!r}')
    return value
