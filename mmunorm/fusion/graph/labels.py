"""Labels: the origin of each element of a tensor, tracked through the operators that only move or average elements.

The labels of a tensor are an integer tensor of its shape. Each element is the number of the channel of the norm or
layer that produced it, or `NOTHING`. An operator that moves elements is applied to the labels too, so this module need
not know what it does to channels. A mean keeps a label if all averaged elements have it, because its weights sum to 1.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

NOTHING = -1

# Operators of one tensor whose output elements are its elements. Composite operators, such as `flatten`, are omitted.
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
# Operators that depend only on the shapes of their tensors.
SHAPE_ONLY = frozenset({
    'zeros_like', 'ones_like', 'full_like', 'empty_like', 'rand_like', 'randn_like', 'new_zeros', 'new_ones',
    'new_full', 'new_empty', 'size', 'sym_size', 'sym_numel', 'sym_stride', 'is_same_size'
})

Labels = Tensor


class Unclear(Exception):
    """Labels cannot be carried through an operator; the message is the reason, to follow 'its output'."""


def carry(name: str, func, args: tuple, kwargs: dict, outputs: list[Tensor],
          of: Callable[[Tensor], Labels | None]) -> list[Labels] | None:
    """Returns the labels of an operator's outputs, or None if it does more than move and average elements.

    `name` is the operator's name without overload, `outputs` are the results of the call, and `of` returns a tensor's
    labels. Raises Unclear if the operator moves or averages elements so that channels are mixed.
    """

    def argument(name: str):
        """The value of an argument of the operator, given or default."""
        places = {each.name: (i, each.default_value) for i, each in enumerate(func._schema.arguments)}
        place, default = places.get(name, (len(args), None))
        return args[place] if place < len(args) else kwargs.get(name, default)

    if name in _JOINS and args:
        if any(not part.numel() for part in args[0]):
            raise Unclear('is concatenated with an empty tensor, which may not be empty at another input size')
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
    """The label of each channel, `(C,)`, or None if a channel has several; `NOTHING` besides a label is padding."""
    labels = shrink(labels, keep=axis).movedim(axis, -1)
    labels = labels.reshape(-1, labels.shape[-1])
    if not len(labels):
        return None
    channels = labels.amax(0)
    return channels if ((labels == channels) | (labels == NOTHING)).all() else None


def shrink(labels: Labels, keep: int | None = None) -> Labels:
    """The labels without the repetitions of expanded dimensions, except those of dimension `keep`."""
    for dim in range(labels.dim()):
        if dim != keep and labels.stride(dim) == 0 and labels.shape[dim] > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels
