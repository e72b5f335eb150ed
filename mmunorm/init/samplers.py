"""Distributions of initial weights, each with a given deviation (Su, kexue 8620)."""
from __future__ import annotations

import torch
from torch import Tensor

# The deviation of a standard normal variable without its values beyond [-2, 2].
TRUNCATED_DEVIATION = 0.8796256610342398


@torch.no_grad()
def sample_(weight: Tensor, std: float, distribution: str = 'normal') -> Tensor:
    """Draws a tensor of mean 0 and deviation `std`, in place.

    Args:
        weight: any shape, any floating dtype.
        std: the deviation.
        distribution: 'normal'; 'uniform', on `[-sqrt(3) std, sqrt(3) std]`; or 'truncated', a normal one of deviation
            `std / 0.8796`, cut at two of these, which leaves `std`.

    Returns:
        `weight`.

    Raises:
        ValueError: there is no such distribution.
    """
    if distribution == 'normal':
        return weight.normal_(0, std)
    if distribution == 'uniform':
        return weight.uniform_(-(3**0.5) * std, 3**0.5 * std)
    if distribution == 'truncated':
        wide = std / TRUNCATED_DEVIATION
        return torch.nn.init.trunc_normal_(weight, 0, wide, -2 * wide, 2 * wide)
    raise ValueError(f"distribution must be 'normal', 'uniform' or 'truncated', got {distribution!r}")
