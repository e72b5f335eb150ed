"""Channel tags: values that tell which channel an element of a tensor comes from, whatever has moved or averaged it.

Each channel has a number, and the number two values: a positive and a negative one, in another order. A tag is a pair
of tensors filled with these values. A function is applied to both: where it moves elements, or averages elements of one
channel, both still show the same number. Where it does anything else, they do not. Each element adds a fraction to its
values, of opposite sign in the two tensors, so that a maximum is not taken for an average.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

NOTHING, MIXED = -1, -2  # elements that depend on no tagged tensor, and those that were computed from one
_STEP = 4096  # between the values of two channels
_SAMPLE = 2**13  # elements


class Source(NamedTuple):
    """Where channels come from, and their numbers.

    `kind` is 'norm', the output of a norm; 'layer', that of a linear operator with the weight `name`; 'parameter', a
    parameter or buffer along its dimension `axis`; 'scaled', the output of a layer multiplied by the parameter `name`;
    'written norm' and 'token', a norm's output or a parameter after a sum or a product.
    """
    kind: str
    name: str
    numbers: range
    axis: int = 0


class Sources:
    """All sources of a model, by number."""

    def __init__(self):
        self.all: list[Source] = []
        self.of: dict[tuple[str, str], Source] = {}  # by kind and name
        self.size = 0

    def add(self, kind: str, name: str, size: int, axis: int = 0) -> None:
        source = Source(kind, name, range(self.size, self.size + size), axis)
        self.all.append(source)
        self.of[kind, name] = source
        self.size += size

    def finish(self) -> None:
        """Makes the tables, once all sources are known."""
        self._starts = [source.numbers.start for source in self.all]
        sizes = torch.tensor([len(source.numbers) for source in self.all])
        self.index = torch.arange(len(self.all)).repeat_interleave(sizes)
        self.channel = torch.arange(self.size) - torch.tensor(self._starts)[self.index]
        # The number of a channel once it was written to a residual stream.
        self.written = torch.arange(self.size)
        for kind, written in (('norm', 'written norm'), ('parameter', 'token')):
            for source in self.all:
                if source.kind == kind and (written, source.name) in self.of:
                    start = self.of[written, source.name].numbers.start
                    self.written[source.numbers.start:source.numbers.stop] += start - source.numbers.start

    def at(self, number: int) -> tuple[Source, int]:
        """The source and the channel of a number."""
        source = self.all[bisect_right(self._starts, number) - 1]
        return source, number - source.numbers.start


class Tag:
    """The pair of tensors beside a tensor."""
    __slots__ = ('first', 'second', '_tags', '_numbers')

    def __init__(self, tags: Tags, first: Tensor, second: Tensor, numbers: Tensor | None = None):
        self._tags, self.first, self.second, self._numbers = tags, first, second, numbers

    @property
    def numbers(self) -> Tensor:
        """The number of each element, or `NOTHING` or `MIXED`."""
        if self._numbers is None:
            self._numbers = self._tags.read(self.first, self.second)
        return self._numbers

    def sample(self) -> Tensor:
        """The numbers of some elements, in one dimension."""
        if self._numbers is not None:
            return _sample(self._numbers)[0]
        return self._tags.read(*_sample(self.first, self.second))


class Tags:
    """The values of the numbers from 0 to `size`, excluded."""

    def __init__(self, size: int):
        generator = torch.Generator().manual_seed(0)

        def values(order: Tensor) -> Tensor:
            offsets = torch.randint(_STEP // 4, 3 * _STEP // 4, (size, ), generator=generator)
            return ((order + 1) * _STEP + offsets).double()

        self._values = values(torch.arange(size)), -values(torch.randperm(size, generator=generator))
        self._fractions = torch.empty(0)

    def tag(self, numbers: Tensor, size: Iterable[int], device: torch.device) -> Tag:
        """The tag of a tensor of this size, whose elements have these numbers; `numbers` may be broadcast."""
        size = torch.Size(size)
        if len(self._fractions) < size.numel():
            positions = torch.arange(size.numel(), dtype=torch.float64)
            self._fractions = positions.mul_(0.6180339887498949).frac_().div_(4)
        fractions = self._fractions[:size.numel()].view(size)
        first, second = self.untagged_values(numbers)
        nothing = numbers == NOTHING
        return Tag(self, (first + fractions.where(~nothing, fractions.new_zeros(()))).to(device),
                   (second - fractions.where(~nothing, fractions.new_zeros(()))).to(device), numbers.expand(size))

    def untagged_values(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The values of numbers, 0 for `NOTHING`."""
        valid = numbers.clamp(min=0)
        return tuple(values[valid].where(numbers >= 0, values.new_zeros(())) for values in self._values)

    def along(self, numbers: range, like: Tensor, axis: int, is_exact: bool = False) -> Tag:
        """The tag of a tensor like `like`, whose dimension `axis` is the channels of these numbers.

        `is_exact` adds no fractions, as a tag of a parameter needs that is broadcast.
        """
        shape = [1] * like.dim()
        shape[axis] = -1
        numbers = torch.arange(numbers.start, numbers.stop).view(shape)
        if not is_exact:
            return self.tag(numbers, like.shape, like.device)
        return Tag(self, *(values.to(like.device).expand(like.shape) for values in self.untagged_values(numbers)),
                   numbers.expand(like.shape))

    def read(self, a: Tensor, b: Tensor) -> Tensor:
        """The number of each element of a pair, or `NOTHING` or `MIXED`, on the CPU."""
        a, b = a.cpu(), b.cpu()
        if a.dtype != torch.float64:
            return torch.where(a == b, NOTHING, MIXED)
        first, second = self._values
        numbers = (a / _STEP).long().sub_(1).clamp_(0, len(first) - 1)
        off = a - first[numbers]
        is_tag = (off.abs() < 1) & ((off + b - second[numbers]).abs() < 1e-3)
        return torch.where(is_tag, numbers, torch.where(a == b, NOTHING, MIXED))

    def moved(self, pair: tuple[Tensor, Tensor]) -> Tag | None | bool:
        """The tag of what a function made of a tag; None if no element depends on it, False if it is mixed."""
        a, b = pair
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if torch.equal(a, b):
            return None
        tag = Tag(self, a, b)
        return False if bool((tag.sample() == MIXED).any()) else tag


def mapped(function: Callable[[Tensor], object], tag: Tag) -> Tag:
    """A tag after a function that moves elements."""
    numbers = tag._numbers
    return Tag(tag._tags, function(tag.first), function(tag.second), None if numbers is None else function(numbers))


def _sample(*tensors: Tensor) -> list[Tensor]:
    """The same elements of tensors of one shape."""
    for dim in range(tensors[0].dim()):
        if tensors[0].shape[dim] > 1 and not any(tensor.stride(dim) for tensor in tensors):  # repetitions
            tensors = [tensor.narrow(dim, 0, 1) for tensor in tensors]
    flat = [tensor.flatten() for tensor in tensors]
    if len(flat[0]) <= _SAMPLE:
        return flat
    some = torch.arange(_SAMPLE, device=flat[0].device) * 1_000_003 % len(flat[0])
    return [tensor[some] for tensor in flat]
