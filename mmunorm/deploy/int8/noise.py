"""What few bits do to a linear layer, simulated in floating point."""
from __future__ import annotations

import torch
from torch import Tensor

TAILS = (0., 1e-4, 1e-3)  # shares of values beyond each end of a range


@torch.no_grad()
def signal_to_noise(tokens: Tensor, weight: Tensor, bits: int) -> float:
    """Signal to noise of a quantized linear layer's output in dB: its variance over the mean squared error.

    Activations have the range of :func:`best_range`; weights have a symmetric one for each output.

    Args:
        tokens (Tensor): `(N, C)`, what the layer reads.
        weight (Tensor): `(outputs, C)`.
        bits (int): of activations and weights.
    """
    noise = min(_error(tokens, weight, ends, bits) for ends in _ranges(tokens))
    return decibels((tokens @ weight.T).var(0, correction=0).mean(), noise)


def decibels(signal: Tensor, noise: Tensor) -> float:
    """`10 log10(signal / noise)`."""
    return (10 * torch.log10(signal / noise)).item()


def best_range(tokens: Tensor, weight: Tensor, bits: int) -> tuple[float, float]:
    """The range of activations, of those that the :data:`TAILS` give, with the smallest error of the layer's output.

    Arguments are those of :func:`signal_to_noise`.
    """
    return min(_ranges(tokens), key=lambda ends: _error(tokens, weight, ends, bits).item())


def _ranges(tokens: Tensor) -> list[tuple[float, float]]:
    return [value_range(tokens, tail) for tail in TAILS]


def _error(tokens: Tensor, weight: Tensor, ends: tuple[float, float], bits: int) -> Tensor:
    return (quantize(tokens, *ends, bits) @ quantize_weight(weight, bits).T - tokens @ weight.T).square().mean()


def value_range(x: Tensor, tail: float) -> tuple[float, float]:
    """Between which values all of `x` lies, but for a share of `tail` below and as much above."""
    if not tail:
        return x.min().item(), x.max().item()
    ordered = x.flatten().sort().values
    beyond = int(tail * len(ordered))
    return ordered[beyond].item(), ordered[-1 - beyond].item()


def quantize(x: Tensor, low: float, high: float, bits: int) -> Tensor:
    """`x` with 2^bits values between `low` and `high`, of which 0 is one."""
    low, high = min(low, 0.), max(high, 0.)
    levels = 2**bits - 1
    step = max((high - low) / levels, torch.finfo(x.dtype).tiny)
    return torch.fake_quantize_per_tensor_affine(x, step, round(-low / step), 0, levels)


def quantize_weight(weight: Tensor, bits: int) -> Tensor:
    """A weight `(outputs, ...)` with 2^bits - 1 values for each output, as many below 0 as above."""
    levels = 2**(bits - 1) - 1
    step = weight.detach().flatten(1).abs().amax(1).clamp(min=torch.finfo(weight.dtype).tiny) / levels
    zeros = torch.zeros_like(step, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, step, zeros, 0, -levels, levels)
