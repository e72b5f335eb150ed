"""Where the elements of a tensor come from, carried through the operators that only move or average them.

A tensor's labels are an integer tensor of its shape: for each element the channel of a norm or layer whose output it
is, by one number for each channel of each, or `NOTHING`. An operator that moves elements does the same to the labels,
so what it does to channels need not be known here. A mean keeps a label where all that it averages have the same one,
for its weights add up to 1.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

NOTHING = -1

# Of one tensor, each element of the output is one of its elements.
_MOVES = frozenset({
    'permute', 'transpose', 't', 'numpy_T', 'mT', 'matrix_H', 'movedim', 'moveaxis', 'swapaxes', 'swapdims',
    'unsqueeze', 'squeeze', 'expand', 'broadcast_to', 'flatten', 'unflatten', 'slice', 'narrow', 'select',
    'split', 'split_with_sizes', 'unsafe_split', 'unsafe_split_with_sizes', 'chunk', 'unsafe_chunk',
    'tensor_split', 'unbind', 'diagonal', 'roll', 'flip', 'rot90', 'repeat', 'tile', 'repeat_interleave',
    'index_select', 'index', 'gather', 'pixel_shuffle', 'pixel_unshuffle', 'channel_shuffle',
    'native_channel_shuffle', 'unfold'
})
_RESHAPES = frozenset({'view', '_unsafe_view', 'reshape'})
_SAME = frozenset({'clone', 'contiguous', 'alias', 'detach', 'lift_fresh', 'to', '_to_copy'})
_DROPOUTS = frozenset({'dropout', 'feature_dropout', 'alpha_dropout', 'feature_alpha_dropout'})
_JOINS = frozenset({'cat', 'concat', 'concatenate', 'stack', 'hstack', 'vstack', 'dstack'})
_POOL = re.compile(r'_?(?:adaptive_avg_pool|avg_pool|upsample_[a-z_]*?)([123])d')
# Of their tensors, these read nothing but the shape.
SHAPE_ONLY = frozenset({
    'zeros_like', 'ones_like', 'full_like', 'empty_like', 'rand_like', 'randn_like', 'new_zeros', 'new_ones',
    'new_full', 'new_empty', 'size', 'sym_size', 'sym_numel', 'sym_stride', 'is_same_size'
})

Labels = Tensor
Of = Callable[[Tensor], Labels | None]


class Unclear(Exception):
    """Labels cannot be carried through an operator; the message says why, behind 'its output'."""


def carry(name: str, func, args: tuple, kwargs: dict, outputs: list[Tensor], of: Of) -> list[Labels] | None:
    """The labels of an operator's outputs, or None for an operator that does more than move and average.

    Args:
        name: of the operator, without overload.
        func, args, kwargs: the call.
        outputs: what it has answered.
        of: the labels of a tensor; None if it has none.

    Raises:
        Unclear: it moves or averages, but not so that channels stay what they are.
    """
    if name in _JOINS and args:
        parts = [torch.full(part.shape, NOTHING, device=part.device) if of(part) is None else of(part)
                 for part in args[0]]
        answers = func(parts, *args[1:], **kwargs)
    elif not args or not isinstance(args[0], Tensor) or of(args[0]) is None:
        return None
    elif name in _RESHAPES:
        labels = of(args[0])
        if not all(isinstance(output, Tensor) and output.dtype == args[0].dtype for output in outputs):
            return None
        answers = [labels.reshape(output.shape) for output in outputs]
    elif name in _MOVES:
        if any(of(tensor) is not None for tensor in tensors_in((args[1:], kwargs))):
            return None
        labels = of(args[0])
        answers = func(labels.contiguous() if name == 'unflatten' else labels, *args[1:], **kwargs)
    elif name in _SAME or name in _DROPOUTS and not _argument(func, args, kwargs, 'train'):
        if not outputs[0].is_floating_point():
            return None
        answers = of(args[0]).to(outputs[0].device)
    elif name in ('pad', 'constant_pad_nd'):
        answers = _padded(of(args[0]), func, args, kwargs)
    elif name == 'mean':
        answers = _mean(of(args[0]), args, kwargs, outputs[0])
    elif match := _POOL.fullmatch(name.removesuffix('_aa')):
        answers = _pooled(of(args[0]), int(match[1]), func, args, kwargs, outputs[0])
    else:
        return None
    answers = [answers] if isinstance(answers, Tensor) else list(answers)
    if [answer.shape for answer in answers] != [output.shape for output in outputs]:
        return None
    return answers


def tensors_in(value) -> Iterator[Tensor]:
    """The tensors of an argument, or of several."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def _argument(func, args: tuple, kwargs: dict, name: str):
    """The value of an operator's argument, as it was called or by default."""
    if name in kwargs:
        return kwargs[name]
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[i] if i < len(args) else argument.default_value
    return None


def _padded(labels: Labels, func, args: tuple, kwargs: dict) -> Labels:
    amounts = args[1]
    if not any(amounts):
        raise Unclear('is padded by nothing at this input size, and may be at another')
    mode = _argument(func, args, kwargs, 'mode') or 'constant'
    if mode == 'constant':
        return F.pad(labels, amounts, value=NOTHING)
    return F.pad(labels.double(), amounts, mode=mode).long()


def _mean(labels: Labels, args: tuple, kwargs: dict, output: Tensor) -> Labels:
    dims = args[1] if len(args) > 1 else kwargs.get('dim')
    dims = [dims] if isinstance(dims, int) else list(dims or range(labels.dim()))
    if not labels.numel():
        raise Unclear('has no elements')
    least, most = labels.amin(dims), labels.amax(dims)
    if not torch.equal(least, most):
        raise Unclear('is averaged with other values')
    return least.reshape(output.shape)


def _pooled(labels: Labels, dims: int, func, args: tuple, kwargs: dict, output: Tensor) -> Labels:
    if 'adaptive' not in func._schema.name and 'avg_pool' in func._schema.name:
        padding = _argument(func, args, kwargs, 'padding')
        pads = any(padding) if isinstance(padding, (tuple, list)) else padding
        if pads and _argument(func, args, kwargs, 'count_include_pad') or _argument(
                func, args, kwargs, 'divisor_override'):
            raise Unclear('is averaged with zero padding')
    first = labels[(..., *[slice(0, 1)] * dims)]
    if not torch.equal(first.expand(labels.shape), labels):
        raise Unclear('is averaged with other values')
    return first.expand(output.shape)


def by_channel(labels: Labels, axis: int) -> Labels | None:
    """The one label of each channel, `(C,)`, or None where a channel has several or a mixture with `NOTHING`."""
    labels = shrink(labels, keep=axis).movedim(axis, -1)
    labels = labels.reshape(-1, labels.shape[-1])
    if not len(labels) or not torch.equal(labels[:1].expand(labels.shape), labels):
        return None
    return labels[0]


def shrink(labels: Labels, keep: int | None = None) -> Labels:
    """Without what is there several times by an expanded dimension; dimension `keep` stays whole."""
    for dim in range(labels.dim()):
        if dim != keep and labels.stride(dim) == 0 and labels.shape[dim] > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels
