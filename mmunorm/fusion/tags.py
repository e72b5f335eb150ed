"""Channel tags: values that tell which channel an element of a tensor comes from, whatever has moved or averaged it.

Each channel has a number, and the number two values: a positive and a negative one, in another order. A tag is a pair
of tensors filled with these values. A function is applied to both: where it moves elements, or averages elements of one
channel, both still show the same number. Where it does anything else, they do not. No function that is followed takes
a maximum, which would look like an average (see `operators`).
"""
from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
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
        generator = torch.Generator().manual_seed(0)
        orders = torch.stack([torch.arange(self.size), torch.randperm(self.size, generator=generator)]) + 1
        offsets = torch.randint(_STEP // 4, 3 * _STEP // 4, orders.shape, generator=generator)
        first, second = (orders * _STEP + offsets).double()
        self.values = first, -second

    def at(self, number: int) -> tuple[Source, int]:
        """The source and the channel of a number."""
        source = self.all[bisect_right(self._starts, number) - 1]
        return source, number - source.numbers.start

    def read(self, a: Tensor, b: Tensor) -> Tensor:
        """The number of each element of a pair, or `NOTHING` or `MIXED`, on the CPU."""
        a, b = a.cpu(), b.cpu()
        numbers = torch.where(a == b, NOTHING, MIXED)
        if a.dtype != torch.float64:
            return numbers
        first, second = self.values
        nearest = (a / _STEP).long().sub_(1).clamp_(0, self.size - 1)
        is_tag = ((a - first[nearest]).abs() < 1e-3) & ((b - second[nearest]).abs() < 1e-3)
        return torch.where(is_tag, nearest, numbers)


class Tag:
    """What goes beside a tensor: the number of each of its elements, or the pair of tensors that shows them."""

    def __init__(self, sources: Sources, numbers: Tensor | None = None, pair: tuple[Tensor, Tensor] | None = None):
        self._sources = sources
        if numbers is not None:
            self.numbers = numbers
        if pair is not None:
            self.pair = pair

    @cached_property
    def pair(self) -> tuple[Tensor, Tensor]:
        numbers, = unrepeated(self.numbers)
        return tuple(values[numbers.clamp(min=0)].where(numbers >= 0, 0.).expand(self.numbers.shape).contiguous()
                     for values in self._sources.values)

    @cached_property
    def numbers(self) -> Tensor:
        """The number of each element, or `NOTHING` or `MIXED`."""
        return self._sources.read(*unrepeated(*self.pair)).expand(self.pair[0].shape)

    @cached_property
    def sample(self) -> Tensor:
        """The numbers of some elements, in one dimension."""
        return _sample(self.numbers)[0] if 'numbers' in vars(self) else self._sources.read(*_sample(*self.pair))

    @cached_property
    def found(self) -> list[int]:
        """The numbers in the sample, except `NOTHING` and `MIXED`."""
        return self.sample[self.sample >= 0].unique().tolist()

    @cached_property
    def sources(self) -> list[int]:
        """The indices of their sources."""
        return self._sources.index[self.found].unique().tolist()


def unrepeated(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape, with a size of 1 in each dimension along which none of them changes."""
    for dim in range(tensors[0].dim()):
        if tensors[0].shape[dim] > 1 and all(_is_constant(tensor, dim) for tensor in tensors):
            tensors = tuple(tensor.narrow(dim, 0, 1) for tensor in tensors)
    return list(tensors)


def _is_constant(tensor: Tensor, dim: int) -> bool:
    first = tensor.narrow(dim, 0, 1)
    return not tensor.stride(dim) or (torch.equal(first, tensor.narrow(dim, -1, 1))
                                      and torch.equal(tensor, first.expand_as(tensor)))


def _sample(*tensors: Tensor) -> list[Tensor]:
    """The same elements of tensors of one shape."""
    flat = [tensor.flatten() for tensor in unrepeated(*tensors)]
    if len(flat[0]) <= _SAMPLE:
        return flat
    some = torch.arange(_SAMPLE, device=flat[0].device) * 1_000_003 % len(flat[0])
    return [tensor[some] for tensor in flat]
