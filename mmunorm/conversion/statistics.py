"""The affine map nearest to a LayerNorm, as in :func:`.convert.convert_norms`, and the error of any other map.

Both are computed from the six sums of :func:`token_sums`, which can be added over calls, batches and processes.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..norms.layers import channel_axis, input_of

# n, sum x, sum x^2, sum u, sum u^2, sum x u.
NUM_SUMS = 6
EPS = 1e-12  # the smallest divisor


def tokens_of(norm: nn.Module, args: tuple, kwargs: dict) -> Tensor:
    """The input tokens of a norm without padding, `(n, C)` float64."""
    x, pad_mask = input_of(args, kwargs)
    return valid_tokens(x.movedim(channel_axis(norm, kwargs), -1), pad_mask)


def valid_tokens(x: Tensor, pad_mask: Tensor | None) -> Tensor:
    """The tokens of `x` `(..., C)` that are not padding, `(n, C)` float64."""
    tokens = x.detach().reshape(-1, x.shape[-1])
    if pad_mask is not None:
        tokens = tokens[~pad_mask.flatten()]
    return tokens.double()


def deviations(tokens: Tensor, eps: float, centered: bool = True) -> tuple[Tensor, Tensor]:
    """LayerNorm's statistics of tokens `(n, C)`: the mean and `sqrt(variance + eps)` of each, `(n, 1)`.

    For RMSNorm the mean is 0: `centered` is False.
    """
    if not centered:
        square = tokens.square().mean(-1, keepdim=True)
        return torch.zeros_like(square), (square + eps).sqrt()
    variance, mean = torch.var_mean(tokens, dim=-1, correction=0, keepdim=True)
    return mean, (variance + eps).sqrt()


def token_sums(tokens: Tensor, eps: float, centered: bool = True) -> Tensor:
    """The six sums over tokens `(n, C)`: `(6, C)` in the dtype of `tokens`."""
    mean, sigma = deviations(tokens, eps, centered)
    u = (tokens - mean) / sigma
    count = torch.full_like(tokens[0] if len(tokens) else tokens.sum(0), len(tokens))
    return torch.stack([count, tokens.sum(0), tokens.square().sum(0), u.sum(0), u.square().sum(0),
                        (tokens * u).sum(0)])


def nearest_affine(sums: Tensor, gamma: Tensor, beta: Tensor, precision: float) -> tuple[Tensor, Tensor]:
    """The `a * x + b` nearest to LayerNorm with `gamma` and `beta` `(C,)`: two `(C,)` tensors.

    `sums` `(6, C)` are of at least one token. A channel whose variation is within the rounding error of its values,
    given by the `precision` of their dtype, gets a = 0: the mean output of LN.
    """
    _, x, x2, u, _, xu = sums / sums[0]
    variance = x2 - x.square()
    varies = variance > precision**2 * x2
    a = torch.where(varies, gamma * (xu - x * u) / torch.where(varies, variance, 1), 0)
    return a, beta + gamma * u - a * x


def relative_error(sums: Tensor, gamma: Tensor, beta: Tensor, a: Tensor, b: Tensor) -> float:
    """`E|LN(x) - (a x + b)|^2 / E|LN(x) - beta|^2`, over all channels; 0 if gamma is 0 everywhere."""
    _, x, x2, u, u2, xu = sums / sums[0]
    d = b - beta
    error = (gamma.square() * u2 + a.square() * x2 + d.square()
             + 2 * (a * d * x - gamma * (a * xu + d * u))).sum()
    size = (gamma.square() * u2).sum()
    return max(0., (error / size).item()) if size > 0 else 0.


def error_over_variance(x: Tensor, target: Tensor) -> Tensor:
    """`|x - target|^2 / |target - mean(target)|^2` over the last dimension, `(N,)` of `(N, n)`."""
    size = (target - target.mean(-1, keepdim=True)).square().sum(-1).clamp(min=EPS)
    return (x - target).square().sum(-1) / size
