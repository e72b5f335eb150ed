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
_SAMPLE = 2**13  # elements: a layer reads all of them, and the outputs of a folded copy are compared

Twins = tuple[Tensor, Tensor]


class Dyes:
    """The values of the numbers from 0 to `size`, excluded."""

    def __init__(self, size: int):
        generator = torch.Generator().manual_seed(0)

        def values(order: Tensor) -> Tensor:
            offsets = torch.randint(_STEP // 4, 3 * _STEP // 4, (size, ), generator=generator)
            return ((order + 1) * _STEP + offsets).double()

        self._values = values(torch.arange(size)), -values(torch.randperm(size, generator=generator))
        self._fractions = torch.empty(0)

    def twins(self, numbers: range, like: Tensor, axis: int) -> Twins:
        """The twins of a tensor like `like`, whose dimension `axis` is the channels of these numbers."""
        if len(self._fractions) < like.numel():
            positions = torch.arange(like.numel(), device=like.device, dtype=torch.float64)
            self._fractions = positions.mul_(0.6180339887498949).frac_().div_(4)
        first, second = self.rows(numbers, like.movedim(axis, 0))
        fractions = self._fractions[:like.numel()].to(like.device).view(like.shape)
        return first.movedim(0, axis) + fractions, second.movedim(0, axis) - fractions

    def rows(self, numbers: range, like: Tensor) -> Twins:
        """The twins of a tensor like `like` each of whose rows has one number, without fractions."""
        first, second = (values[numbers.start:numbers.stop].to(like.device, copy=True) for values in self._values)
        shape = [-1] + [1] * (like.dim() - 1)
        return first.view(shape).expand(like.shape), second.view(shape).expand(like.shape)

    def read(self, twins: Twins) -> Tensor:
        """The number of each element, or `NOTHING` or `MIXED`."""
        a, b = twins
        if a.dtype != torch.float64:
            return torch.where(a == b, NOTHING, MIXED)
        first, second = (values.to(a.device) for values in self._values)
        numbers = (a / _STEP).long().sub_(1).clamp_(0, len(first) - 1)
        off = a - first[numbers]
        is_dye = (off.abs() < 1) & ((off + b - second[numbers]).abs() < 1e-3)
        return torch.where(is_dye, numbers, torch.where(a == b, NOTHING, MIXED))

    def sample(self, twins: Twins) -> Tensor:
        """What `read` returns for some elements, in one dimension."""
        a, b = twins
        for dim in range(a.dim()):
            if a.stride(dim) == b.stride(dim) == 0 and a.shape[dim] > 1:  # repetitions
                a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
        a, b = a.flatten(), b.flatten()
        if len(a) > _SAMPLE:
            some = torch.arange(_SAMPLE, device=a.device) * 1_000_003 % len(a)
            a, b = a[some], b[some]
        return self.read((a, b))

    def is_moved(self, twins: Twins) -> bool | None:
        """Whether a sample of the elements is not mixed; None if no element depends on a dyed tensor."""
        a, b = twins
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return None if torch.equal(a, b) else not bool((self.sample(twins) == MIXED).any())
