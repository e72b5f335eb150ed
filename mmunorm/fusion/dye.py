"""Dye: values that tell which channel an element of a tensor comes from, whatever has moved or averaged it.

Each channel has a number, and the number two values: a positive and a negative one, in another order. A dyed tensor has
two twins, filled with these values. An operator is applied to both twins: where it moves elements, or averages elements
of one channel, both still show the same number. Where it does anything else, they do not. Each element adds a fraction
to its values, of opposite sign in the two twins, so that a maximum is not taken for an average.
"""
from __future__ import annotations

import torch
from torch import Tensor

NOTHING, MIXED = -1, -2  # elements that do not depend on any dyed tensor, and those that were computed from one
_STEP = 4096  # between the values of two channels
_SAMPLE = 2**12

Twins = tuple[Tensor, Tensor]


class Dyes:
    """The values of the numbers from 0 to `size`, excluded."""

    def __init__(self, size: int):
        generator = torch.Generator().manual_seed(0)

        def values(order: Tensor) -> Tensor:
            offsets = torch.randint(_STEP // 4, 3 * _STEP // 4, (size, ), generator=generator)
            return ((order + 1) * _STEP + offsets).double()

        self._values = values(torch.arange(size)), -values(torch.randperm(size, generator=generator))

    def twins(self, numbers: range, like: Tensor, axis: int) -> Twins:
        """The twins of a tensor like `like`, whose dimension `axis` is the channels of these numbers."""
        part = torch.arange(like.numel(), device=like.device, dtype=torch.float64).mul_(0.6180339887498949).frac_()
        part = part.div_(4).view(like.shape)
        shape = [1] * like.dim()
        shape[axis] = -1
        first, second = (values[numbers.start:numbers.stop].to(like.device).view(shape) for values in self._values)
        return first + part, second - part

    def rows(self, numbers: range, like: Tensor) -> Twins:
        """The twins of a parameter: each of its rows has one number."""
        shape = [-1] + [1] * (like.dim() - 1)
        first, second = (values[numbers.start:numbers.stop].to(like.device).clone().view(shape).expand(like.shape)
                         for values in self._values)
        return first, second

    def read(self, twins: Twins) -> Tensor:
        """The number of each element, or `NOTHING` or `MIXED`."""
        a, b = twins
        nothing = (a == b) | a.isnan() & b.isnan()
        if a.dtype != torch.float64:
            return torch.where(nothing, NOTHING, MIXED)
        first, second = (values.to(a.device) for values in self._values)
        numbers = (a / _STEP).long().sub_(1).clamp_(0, len(first) - 1)
        off = a - first[numbers]
        is_dye = (off.abs() < 1) & ((off + b - second[numbers]).abs() < 1e-3)
        return torch.where(is_dye, numbers, torch.where(nothing, NOTHING, MIXED))

    def all_in(self, twins: Twins) -> list[int]:
        """The distinct numbers in the twins, in order."""
        a, b = twins
        for dim in range(a.dim()):
            if a.stride(dim) == b.stride(dim) == 0 and a.shape[dim] > 1:  # repetitions
                a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
        seen = torch.zeros(len(self._values[0]) + 2, dtype=torch.bool)
        seen[self.read((a, b)).flatten().cpu()] = True  # `NOTHING` and `MIXED` are the last
        return seen[:-2].nonzero().flatten().tolist()

    def is_moved(self, twins: Twins) -> bool | None:
        """Whether all elements show one number each or depend on no dyed tensor; None if none depends on one.

        Looks at a sample of the elements. A layer reads all of them.
        """
        a, b = twins
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if torch.equal(a, b):
            return None
        if a.numel() > _SAMPLE:
            some = torch.arange(_SAMPLE, device=a.device) * 1_000_003 % a.numel()
            a, b = a.flatten()[some], b.flatten()[some]
        return not bool((self.read((a, b)) == MIXED).any())
