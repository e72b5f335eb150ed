"""Weights and activations that keep the second moment E[x^2] of their input (Su, kexue 8620)."""
from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from mmunorm.registry import MODELS

ACTIVATIONS = {'ReLU': nn.ReLU, 'GELU': nn.GELU, 'SiLU': nn.SiLU, 'SELU': nn.SELU, 'Tanh': nn.Tanh}
MODES = ('fan_in', 'fan_out', 'fan_avg')
# The standard deviation of a standard normal distribution truncated to [-2, 2].
TRUNCATED_DEVIATION = 0.8796256610342398


@torch.no_grad()
def sample_(weight: Tensor, std: float, distribution: str = 'normal') -> Tensor:
    """Fills a tensor with samples of mean 0 and standard deviation `std`, in place, and returns it.

    `distribution` is 'normal'; 'uniform', on `[-sqrt(3) std, sqrt(3) std]`; or 'truncated', a normal distribution of
    deviation `std / 0.8796`, truncated at two deviations, which leaves `std`. Any other is a ValueError.
    """
    if distribution == 'normal':
        return weight.normal_(0, std)
    if distribution == 'uniform':
        return weight.uniform_(-(3**0.5) * std, 3**0.5 * std)
    if distribution == 'truncated':
        wide = std / TRUNCATED_DEVIATION
        return torch.nn.init.trunc_normal_(weight, 0, wide, -2 * wide, 2 * wide)
    raise ValueError(f"distribution must be 'normal', 'uniform' or 'truncated', got {distribution!r}")


def activation_gain(activation: Callable[[Tensor], Tensor]) -> float:
    """`E[f(z)^2]^(-1/2)` for z ~ N(0, 1), by numerical integration: 1.41421 for ReLU, 1.53353 for GELU.

    `activation` f is any elementwise function of a float64 tensor; a ValueError if it is 0 everywhere, or not finite.
    """
    # The trapezoidal rule; 0, where ReLU has its kink, is a node.
    z = torch.linspace(-12, 12, 2**16 + 1, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    with torch.no_grad():
        moment = torch.trapezoid(activation(z).square() * density, z).item()
    if not 0 < moment < math.inf:
        raise ValueError(f'activation: its second moment under N(0, 1) must be positive and finite, got {moment}')
    return moment**-0.5


@cache
def gain_of(name: str | None) -> float:
    """The gain of an activation by name; 1 for None. A ValueError for an unknown activation."""
    if name is None:
        return 1.
    if name not in ACTIVATIONS:
        raise ValueError(f'activation must be None or one of {", ".join(ACTIVATIONS)}, got {name!r}')
    return activation_gain(ACTIVATIONS[name]())


def keep_second_moment_(weight: Tensor, activation: str | None = None, distribution: str = 'normal',
                        mode: str = 'fan_in') -> Tensor:
    """Samples the weight of a linear layer or convolution with variance `gain^2 / fan`, in place, and returns it.

    With 'fan_in', the activation followed by the layer keeps E[x^2] = 1. For ReLU this is He's initialization;
    'fan_avg' without an activation is Xavier's. With GELU or SiLU, 1 is an unstable fixed point: larger moments grow
    and smaller ones shrink, by a few percent a layer.

    Args:
        weight: `(out, in, ...)`, any floating dtype.
        activation: name of the activation before the layer, one of ReLU, GELU, SiLU, SELU and Tanh, or None.
        distribution: as in :func:`sample_`.
        mode: 'fan_in', 'fan_out', or 'fan_avg', the mean of both.

    Raises:
        ValueError: an argument is not one of its choices, or `weight` has fewer than two dimensions.
    """
    if mode not in MODES:
        raise ValueError(f'mode must be one of {", ".join(map(repr, MODES))}, got {mode!r}')
    if weight.dim() < 2:
        raise ValueError(f'weight must have at least two dimensions, got shape {tuple(weight.shape)}')
    fan_in, fan_out = weight[0].numel(), weight[:, 0].numel()
    fan = dict(fan_in=fan_in, fan_out=fan_out, fan_avg=(fan_in + fan_out) / 2)[mode]
    return sample_(weight, gain_of(activation) / fan**0.5, distribution)


@MODELS.register_module()
class ScaledActivation(nn.Module):
    """`gain * f(x)`, whose second moment is 1 for a standard normal x; for `act_cfg`.

    ReLU is scaled by 1.41421, GELU by 1.53353, SiLU by 1.67653. SELU, whose gain is 1, also has mean 0.

    Args:
        activation (str): f, one of ReLU, GELU, SiLU, SELU and Tanh. Defaults to 'GELU'.
    """

    def __init__(self, activation: str = 'GELU'):
        super().__init__()
        self.gain = gain_of(activation)
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns any shape and floating dtype."""
        return self.gain * self.activation(x)

    def extra_repr(self) -> str:
        return f'gain={self.gain:.6g}'
