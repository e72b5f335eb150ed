"""What the runs of a model show, and what records it: tags of tensors, what consumes them, and attentions."""
from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .folds import Use
from .obstacles import Obstacle
from .operators import KEEP_SCORES, MATRIX_PRODUCTS, PRODUCTS, SIZES, SUMS
from .plan import FoldPlan
from .tags import NOTHING, Numbers, Sources, Tag, unrepeated


@dataclass(eq=False)
class Layer:
    """A linear operator of the run, identified by its weight, or by some rows of a weight."""
    owner: str  # full name of the module that holds the weight
    weight: str  # full name of the weight
    rows: tuple[int, int]  # the rows of the weight that are the operator's, [first, end)
    weights: range  # the numbers of these rows
    outputs: range  # the numbers of its output channels
    inputs: list[int]  # at each channel of its input, the number of its source, or -1; the same in each call
    bias: tuple[tuple[str, int], ...]  # for each row, the vector that holds its bias and the index in it
    obstacle: Obstacle | None  # why nothing can be folded into it


@dataclass(eq=False)
class Attention:
    """One attention: the numbers of queries, keys and values, `(heads, d)` each, or None where they are no layers'."""
    queries: Numbers | None
    keys: Numbers | None
    values: Numbers | None


@dataclass
class Trace:
    """What the runs of a model have shown."""
    sources: Sources = field(default_factory=Sources)
    layers: dict[tuple[str, int, int, str], Layer] = field(default_factory=dict)  # by weight, rows and owner
    uses: dict[int, list[Use]] = field(default_factory=dict)  # other than layers, by number
    not_from_layers: set[str] = field(default_factory=set)  # norms whose input is not only the output of layers
    before: dict[int, tuple[str, int]] = field(default_factory=dict)  # the norm and its channel that read a number
    padded: dict[int, set[str | None]] = field(default_factory=dict)  # by number, modules that pad; None if not filled
    reads: dict[str, list[int]] = field(default_factory=dict)  # by norm that ran, the number at each input channel
    joined: list[tuple[int, int]] = field(default_factory=list)  # indices of sources that are one stream
    scaled: dict[str, set[int]] = field(default_factory=dict)  # by LayerScale, the indices of what it multiplies
    attentions: list[Attention] = field(default_factory=list)
    scores_read: set[int] = field(default_factory=set)  # numbers of keys whose scores are read by more than a softmax
    called: set[str] = field(default_factory=set)  # modules
    used: set[str] = field(default_factory=set)  # parameters
    axes: dict[str, int] = field(default_factory=dict)  # of parameters whose channels are along another dimension

    def obstacle_of(self, numbers: Iterable[int], allowed: Sequence[str] = ()) -> Use | None:
        """A consumer of one of these numbers, except for these kinds."""
        return next((use for number in numbers for use in self.uses.get(number, ()) if use.code not in allowed), None)


@dataclass
class Scores:
    """Products of queries and keys: for each head, the numbers of its channels, `(heads, 2 d)`."""
    heads: Numbers
    is_softmax: bool = False


class Recorder(TorchFunctionMode):
    """The tags of a run, and what consumes them."""

    def __init__(self, plan: FoldPlan):
        super().__init__()
        self._plan, self.trace = plan, Trace()
        self._sources = self.trace.sources
        self._start()

    def _start(self) -> None:  # before a run
        self._inside: list[str] = []  # the modules that are being called
        self._tagged: list[weakref.ref[Tensor]] = []
        self._scored: list[weakref.ref[Tensor]] = []
        self.is_suspended = False
        self.depth = 0  # of functions that are running

    def _set(self, tensor: Tensor, tag: Tag, crosses: bool = False) -> None:
        """`crosses`: whether it may be what a module returns to another."""
        if not hasattr(tensor, 'tag'):
            self._tagged.append(weakref.ref(tensor))
        tensor.tag, tensor.crosses = tag, crosses

    def _along(self, numbers: range, like: Tensor, axis: int) -> Tag:
        """The tag of a tensor like `like`, whose dimension `axis` is the channels of these numbers."""
        shape = [1] * like.dim()
        shape[axis] = -1
        tag = Tag(self._sources, np.broadcast_to(np.array(numbers).reshape(shape), like.shape))
        tag.found = list(numbers)
        return tag

    def _tokens(self, tensor: Tensor, axis: int) -> Numbers:
        """The numbers of a tensor's tokens `(n, C)`, equal ones once, where the dimension `axis` is the channels."""
        numbers, size = np.moveaxis(unrepeated(tensor.tag.numbers)[0], axis, -1), tensor.shape[axis]
        return np.broadcast_to(numbers, (*numbers.shape[:-1], size)).reshape(-1, size)

    def _join(self, numbers: Iterable[int]) -> None:
        """Makes the sources of these numbers one residual stream."""
        indices = self._sources.indices(numbers)
        self.trace.joined += [(indices[0], index) for index in indices[1:]]

    def _stream(self, numbers: Numbers) -> Numbers:
        """Makes the sources of written numbers one stream. Returns these with the same number for each channel."""
        self._join(numbers)
        widest = max((source.numbers for source in self._sources.among(numbers)), key=len, default=range(0))
        return np.where(numbers >= 0, self._sources.channel[numbers] + widest.start, NOTHING)

    def block(self, use: Use, *tensors: Tensor | None) -> None:
        """Records that something other than a layer consumes tensors."""
        for tensor in tensors:
            if hasattr(tensor, 'tag'):
                self._add_use(tensor.tag.found, use)

    def _add_use(self, numbers: Iterable[int] | Numbers, use: Use) -> None:
        use = replace(use, inside=next(reversed(self._inside), ''))
        for number in np.unique(numbers[numbers >= 0]).tolist() if isinstance(numbers, Numbers) else numbers:
            known = self.trace.uses.setdefault(number, [])
            if use not in known:
                known.append(use)

    # Attention: which rows of layers are its queries, keys and values, as one function or as products.

    def _record_attention(self, y: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask=None, dropout_p=0.,
                          is_causal: bool = False, scale=None, enable_gqa: bool = False) -> None:
        q, k, v = (self._heads(tensor) for tensor in (query, key, value))
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            k, v = (None if numbers is None else numbers.repeat(times, -2) for numbers in (k, v))
        scores = None if q is None or k is None or q.shape[-1] != k.shape[-1] else _unique_heads(q, k)
        for tensor, code in ((query, 'query'), (key, 'key')):
            if hasattr(tensor, 'tag'):
                self._add_use(tensor.tag.numbers, Use(code))
        self._add_attention(scores, v, value, y)

    def _multi_head_attention(self, func: Callable, args: tuple, kwargs: dict):
        """torch's attention, whose parts no mode sees: four linear layers around `scaled_dot_product_attention`."""
        with self._suspended():
            output = func(*args, **kwargs)
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        a = given.arguments
        with self:
            weights = ([a[f'{name}_proj_weight'] for name in 'qkv'] if a['use_separate_proj_weight'] else
                       a['in_proj_weight'].chunk(3))
            biases = [None] * 3 if a['in_proj_bias'] is None else a['in_proj_bias'].chunk(3)
            q, k, v = (F.linear(a[name], weight, bias).unflatten(-1, (a['num_heads'], -1)).transpose(0, -2)
                       for name, weight, bias in zip(('query', 'key', 'value'), weights, biases, strict=True))
            is_plain = a['bias_k'] is a['static_k'] is None and not a['add_zero_attn']
            context = F.scaled_dot_product_attention(q, k, v) if is_plain else (q @ k.mT).exp() @ v
            y = F.linear(context.transpose(0, -2).flatten(-2), a['out_proj_weight'], a['out_proj_bias'])
        self._set(output[0], y.tag, crosses=True)
        return output

    def _heads(self, x: Tensor, axis: int = -1) -> Numbers | None:
        """For each head, the numbers of its channels, `(..., d)`; None if tokens differ, or they are no layer's."""
        if not hasattr(x, 'tag') or x.dim() < 2 or not x.numel():
            return None
        numbers = np.moveaxis(x.tag.numbers, axis, -1)
        few, = unrepeated(numbers)
        if few.shape[-2] > 1 or (few < 0).any() or self._sources.kinds(few) != {'layer'}:
            return None
        return numbers[..., 0, :]

    def _add_attention(self, scores: Numbers | None, v: Numbers | None, value: Tensor, y: Tensor) -> None:
        values = None
        if hasattr(value, 'tag'):
            self._add_use(value.tag.numbers, Use('value'))
        if v is not None:
            values = np.unique(v.reshape(-1, v.shape[-1]), axis=0)
            self._set(y, Tag(self._sources, np.broadcast_to(v[..., None, :], y.shape)))
        queries, keys = (None, None) if scores is None else np.split(scores, 2, 1)
        self.trace.attentions.append(Attention(queries, keys, values))

    def _matrix_product(self, input: Tensor, other: Tensor, output: Tensor) -> list[Tag | None] | None:
        """Scores of an attention; their products with values are found by `_follow_scores`."""
        if min(input.dim(), other.dim()) < 2:
            return None
        q, k = self._heads(input), self._heads(other, -2)
        if q is None or k is None:
            return None
        self._add_use(q, Use('query'))
        self._add_use(k, Use('key'))
        self._set_scores(output, Scores(_unique_heads(q, k)))
        return [None]

    def _set_scores(self, tensor: Tensor, scores: Scores) -> None:
        tensor.scores = scores
        if not scores.is_softmax:
            self._scored.append(weakref.ref(tensor))

    def _follow_scores(self, name: str, args: tuple, kwargs: dict, tensors: Sequence[Tensor], output) -> None:
        scored = next(tensor for tensor in tensors if hasattr(tensor, 'scores'))
        scores, others = scored.scores, [tensor for tensor in tensors if tensor is not scored]
        if name in SIZES and not isinstance(output, Tensor):
            return
        is_same = isinstance(output, Tensor) and output.dim() and output.shape[-1] == scored.shape[-1]
        if name in MATRIX_PRODUCTS and scored is args[0] and scores.is_softmax and hasattr(args[1], 'tag'):
            return self._add_attention(scores.heads, self._heads(args[1]), args[1], output)
        if name == 'softmax' and is_same and not scores.is_softmax:
            if kwargs.get('dim', args[1] if len(args) > 1 else None) in (-1, scored.dim() - 1):
                return self._set_scores(output, Scores(scores.heads, True))
        elif name in KEEP_SCORES and is_same:
            is_move = name not in SUMS | PRODUCTS | {'masked_fill', 'masked_fill_', 'where'}
            is_factor = name not in PRODUCTS or all(tensor.shape[-1:] in ((), (1, )) for tensor in others)
            if is_move or not scores.is_softmax and is_factor:
                self._set_scores(output, scores)
        if not scores.is_softmax and not hasattr(output, 'scores'):
            self._note_read(scores)
        self.block(Use('function', name), *others)

    def _note_read(self, scores: Scores) -> None:
        self.trace.scores_read.update(np.split(scores.heads, 2, 1)[1].ravel().tolist())


def _unique_heads(q: Numbers, k: Numbers) -> Numbers:
    """Pairs of queries' and keys' numbers, `(heads, 2 d)`."""
    shape = np.broadcast_shapes(q.shape[:-1], k.shape[:-1])
    pairs = np.concatenate([np.broadcast_to(numbers, (*shape, numbers.shape[-1])) for numbers in (q, k)], -1)
    return np.unique(pairs.reshape(-1, pairs.shape[-1]), axis=0)
