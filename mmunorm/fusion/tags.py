"""Channel tags: values that tell which channel an element of a tensor comes from, whatever has moved or averaged it.

Each channel has a number, and the number two values: a positive and a negative one, in another order. A tag is a pair
of tensors filled with these values. A function is applied to both: where it moves elements, or averages elements of one
channel, both still show the same number. Where it does anything else, they do not. No function that is followed takes
a maximum, which would look like an average (see `operators`).
"""
from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Numbers = np.ndarray
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
        # Three tables by number: the index of its source, its channel, and the number of this channel once it was
        # written to a residual stream. In all of them `NOTHING` and `MIXED` stay what they are: -1 and -2 are the last.
        ends = [MIXED, NOTHING]
        self.index = np.concatenate([*(np.full(len(part.numbers), i) for i, part in enumerate(self.all)), ends])
        self.channel = np.concatenate([*(np.arange(len(part.numbers)) for part in self.all), ends])
        self.written = np.append(np.arange(self.size), ends)
        for kind, written in (('norm', 'written norm'), ('parameter', 'token')):
            for source in self.all:
                if source.kind == kind and (written, source.name) in self.of:
                    start = self.of[written, source.name].numbers.start
                    self.written[source.numbers.start:source.numbers.stop] += start - source.numbers.start
        generator = np.random.default_rng(0)
        orders = np.stack([np.arange(self.size), generator.permutation(self.size)]) + 1
        first, second = (orders * _STEP + generator.integers(_STEP // 4, 3 * _STEP // 4, orders.shape)).astype(float)
        self.values = first, -second

    def at(self, number: int) -> tuple[Source, int]:
        """The source and the channel of a number."""
        return self.all[self.index[number]], int(self.channel[number])

    def indices(self, numbers: Iterable[int]) -> list[int]:
        """The indices of the sources of these numbers."""
        indices = np.unique(self.index[np.asarray(numbers, int)])
        return indices[indices >= 0].tolist()

    def among(self, numbers: Iterable[int]) -> list[Source]:
        """The sources of these numbers."""
        return [self.all[index] for index in self.indices(numbers)]

    def kinds(self, numbers: Iterable[int]) -> set[str]:
        return {source.kind for source in self.among(numbers)}

    def read(self, a: Numbers, b: Numbers) -> Numbers:
        """The number of each element of a pair, or `NOTHING` or `MIXED`."""
        first, second = self.values
        with np.errstate(invalid='ignore'):  # a mask of -inf
            nearest = np.clip((a / _STEP).astype(int) - 1, 0, self.size - 1)
        is_tag = (np.abs(a - first[nearest]) < 1e-3) & (np.abs(b - second[nearest]) < 1e-3)
        return np.where(is_tag, nearest, np.where(a == b, NOTHING, MIXED))


class Tag:
    """What goes beside a tensor: the number of each of its elements, or the pair of tensors that shows them."""

    def __init__(self, sources: Sources, numbers: Numbers | None = None, pair: tuple[Tensor, Tensor] | None = None):
        self._sources = sources
        if numbers is not None:
            self.numbers = numbers
        if pair is not None:
            self.pair = pair

    @cached_property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Tensors of float64."""
        (numbers, ), shape = unrepeated(self.numbers), self.numbers.shape
        return tuple(torch.from_numpy(np.where(numbers >= 0, values[numbers], 0.)).expand(shape).contiguous()
                     for values in self._sources.values)

    @cached_property
    def numbers(self) -> Numbers:
        """The number of each element, or `NOTHING` or `MIXED`; read-only."""
        return np.broadcast_to(self._sources.read(*unrepeated(*self._arrays())), self.pair[0].shape)

    @cached_property
    def sample(self) -> Numbers:
        """The numbers of some elements, in one dimension."""
        return _sample(self.numbers)[0] if 'numbers' in vars(self) else self._sources.read(*_sample(*self._arrays()))

    @cached_property
    def found(self) -> list[int]:
        """The numbers in the sample, except `NOTHING` and `MIXED`."""
        return np.unique(self.sample[self.sample >= 0]).tolist()

    def _arrays(self) -> list[Numbers]:
        return [values.cpu().numpy() for values in self.pair]


def unrepeated(*arrays: Numbers) -> list[Numbers]:
    """Arrays of one shape, with a size of 1 in each dimension along which none of them changes."""
    for dim, size in enumerate(arrays[0].shape):
        if size > 1 and all(_is_constant(array, dim) for array in arrays):
            arrays = tuple(array.take([0], dim) for array in arrays)
    return list(arrays)


def _is_constant(array: Numbers, dim: int) -> bool:
    first = array.take([0], dim)
    return not array.strides[dim] or np.array_equal(first, array.take([-1], dim)) and bool((array == first).all())


def _sample(*arrays: Numbers) -> list[Numbers]:
    """The same elements of arrays of one shape."""
    flat = [array.ravel() for array in unrepeated(*arrays)]
    if len(flat[0]) <= _SAMPLE:
        return flat
    some = np.arange(_SAMPLE) * 1_000_003 % len(flat[0])
    return [array[some] for array in flat]
