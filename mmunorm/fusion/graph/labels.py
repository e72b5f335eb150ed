"""Where the elements of a tensor come from, carried through the operators that only move or average them.

A tensor's labels are an integer tensor of its shape: for each element the channel of a norm or layer whose output it
is, by one number for each channel of each, or `NOTHING`. An operator that moves elements does the same to the labels,
so what it does to channels need not be known here. A mean keeps a label where all that it averages have the same one,
for its weights add up to 1.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

NOTHING = -1

# Of one tensor, each element of the output is one of its elements. Those that torch makes of others, such as
# `flatten`, need not be here.
_MOVES = frozenset({
    'permute', 'transpose', 't', 'unsqueeze', 'squeeze', 'expand', 'slice', 'select', 'split',
    'split_with_sizes', 'unsafe_split', 'unsafe_split_with_sizes', 'unbind', 'diagonal', 'roll', 'flip', 'rot90',
    'repeat', 'repeat_interleave', 'index_select', 'index', 'gather', 'pixel_shuffle', 'pixel_unshuffle',
    'channel_shuffle', 'native_channel_shuffle', 'unfold'
})
_RESHAPES = frozenset({'view', '_unsafe_view', 'reshape'})
_SAME = frozenset({'clone', 'contiguous', 'alias', 'detach', 'lift_fresh', 'to', '_to_copy'})
_DROPOUTS = frozenset({'dropout', 'feature_dropout', 'alpha_dropout', 'feature_alpha_dropout'})
_JOINS = frozenset({'cat', 'stack'})
_POOL = re.compile(r'_?(?:adaptive_avg_pool|avg_pool|upsample_[a-z_]*?)([123])d')
# Of their tensors, these read nothing but the shape.
SHAPE_ONLY = frozenset({
    'zeros_like', 'ones_like', 'full_like', 'empty_like', 'rand_like', 'randn_like', 'new_zeros', 'new_ones',
    'new_full', 'new_empty', 'size', 'sym_size', 'sym_numel', 'sym_stride', 'is_same_size'
})

Labels = Tensor


class Unclear(Exception):
    """Labels cannot be carried through an operator; the message says why, after 'its output'."""


def carry(name: str, func, args: tuple, kwargs: dict, outputs: list[Tensor],
          of: Callable[[Tensor], Labels | None]) -> list[Labels] | None:
    """The labels of an operator's outputs, or None for an operator that does more than move and average.

    `name` is the operator's, without overload, `outputs` what the call has returned, and `of` gives a tensor's labels.
    Unclear is raised where it moves or averages, but not so that channels stay what they are.
    """

    def argument(name: str):
        """The value of the operator's argument, as it was called or by default."""
        places = {each.name: (i, each.default_value) for i, each in enumerate(func._schema.arguments)}
        place, default = places.get(name, (len(args), None))
        return args[place] if place < len(args) else kwargs.get(name, default)

    if name in _JOINS and args:
        if any(not part.numel() for part in args[0]):
            raise Unclear('is joined with nothing at this input size, and may be with something at another')
        parts = [torch.full(part.shape, NOTHING, device=part.device) if of(part) is None else of(part)
                 for part in args[0]]
        carried = func(parts, *args[1:], **kwargs)
    elif not args or not isinstance(args[0], Tensor) or of(args[0]) is None:
        return None
    elif name in _RESHAPES:
        if outputs[0].dtype != args[0].dtype:
            return None
        carried = of(args[0]).reshape(outputs[0].shape)
    elif name in _MOVES:
        carried = func(of(args[0]), *args[1:], **kwargs)
    elif name in _SAME or name in _DROPOUTS and not argument('train'):
        if not outputs[0].is_floating_point():
            return None
        carried = of(args[0]).to(outputs[0].device)
    elif name in ('pad', 'constant_pad_nd'):
        mode = argument('mode') or 'constant'
        carried = (F.pad(of(args[0]), args[1], value=NOTHING) if mode == 'constant' else
                   F.pad(of(args[0]).double(), args[1], mode=mode).long())
    elif name == 'mean':
        carried = _mean(of(args[0]), argument('dim'), outputs[0])
    elif match := _POOL.fullmatch(name.removesuffix('_aa')):
        if 'adaptive' not in name and 'avg_pool' in name and (
                any(argument('padding')) and argument('count_include_pad') or argument('divisor_override')):
            raise Unclear('is averaged with zero padding')
        carried = _mean(of(args[0]), list(range(-int(match[1]), 0)), outputs[0])
    else:
        return None
    carried = [carried] if isinstance(carried, Tensor) else list(carried)
    return carried if [each.shape for each in carried] == [output.shape for output in outputs] else None


def tensors_in(value, depth: int = 6) -> Iterator[Tensor]:
    """The tensors of an argument or output: in containers, and in the attributes of other objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        if not isinstance(value, (tuple, list)):
            value = (value if isinstance(value, Mapping) else getattr(value, '__dict__', {})).values()
        for part in value:
            yield from tensors_in(part, depth - 1)


def _mean(labels: Labels, dims: int | list[int] | None, output: Tensor) -> Labels:
    dims = [dims] if isinstance(dims, int) else list(dims or range(labels.dim()))
    if not labels.numel():
        raise Unclear('has no elements')
    least, most = labels.amin(dims, keepdim=True), labels.amax(dims, keepdim=True)
    if not torch.equal(least, most):
        raise Unclear('is averaged with other values')
    return least.expand(output.shape) if least.dim() == output.dim() else least.reshape(output.shape)


def by_channel(labels: Labels, axis: int) -> Labels | None:
    """The one label of each channel, `(C,)`, or None where a channel has several; `NOTHING` beside one is padding."""
    labels = shrink(labels, keep=axis).movedim(axis, -1)
    labels = labels.reshape(-1, labels.shape[-1])
    if not len(labels):
        return None
    channels = labels.amax(0)
    return channels if ((labels == channels) | (labels == NOTHING)).all() else None


def shrink(labels: Labels, keep: int | None = None) -> Labels:
    """Without what is there several times by an expanded dimension; dimension `keep` stays whole."""
    for dim in range(labels.dim()):
        if dim != keep and labels.stride(dim) == 0 and labels.shape[dim] > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels
