"""Step 1 of folding: a run on tagged tensors, which shows what consumes each norm, layer and parameter.

The run computes what the model computes. Beside each output of a norm or layer, and each parameter, goes its tag (see
`tags`). Linear layers and convolutions read from it which channels they consume. Sums of tagged tensors with the same
channels are residual streams: their tag goes on, and their sources belong together from then on. Products with a
factor for each token, or with a LayerScale, are linear, too. Only the functions listed in `operators` keep a tag. Any
other one is a consumer that prevents folding, whatever it computes on the example: a comparison or a top-k would see
other values in a folded model. The result holds for all inputs of the code paths that the examples take.

Step 3 compares outputs, so this step need not see all: a bias that is shared or not used, a write to the input of a
norm.
"""
from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..modules import map_tensors, tensors_in
from ..norms.layers import channel_axis, input_of
from .examples import Run
from .folds import Use
from .norms import has_act
from .obstacles import Obstacle
from .operators import (
    CASTS,
    JOINS,
    KEEP_SCORES,
    MATRIX_PRODUCTS,
    MIXERS,
    MOVES,
    PRODUCTS,
    SHAPE_ONLY,
    SIZES,
    SUMS,
)
from .plan import FoldPlan, call_obstacle
from .tags import MIXED, NOTHING, Source, Sources, Tag, Tags, mapped

_TRAILING = {F.linear: 0, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}  # dimensions after the channels


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
    reads_padding: bool = False  # whether zeros are among the tokens that it reads


@dataclass
class Scores:
    """Products of queries and keys: for each head, the numbers of its channels, `(heads, 2 d)`."""
    heads: Tensor
    is_softmax: bool = False


@dataclass(eq=False)
class Attention:
    """One attention: the numbers of queries, keys and values, `(heads, d)` each, or None where they are no layers'."""
    queries: Tensor | None
    keys: Tensor | None
    values: Tensor | None


@dataclass
class Trace:
    """What the runs have shown."""
    sources: Sources
    layers: dict[tuple[str, int, int, str], Layer] = field(default_factory=dict)  # by weight, rows and owner
    uses: dict[int, list[Use]] = field(default_factory=dict)  # other than layers, by number
    ran: set[str] = field(default_factory=set)  # norms
    not_from_layers: set[str] = field(default_factory=set)  # norms whose input is not only the output of layers
    before: dict[int, tuple[str, int]] = field(default_factory=dict)  # the norm and its channel that read a number
    padded: dict[int, set[str | None]] = field(default_factory=dict)  # by number, modules that pad; None if not filled
    reads: dict[str, list[int]] = field(default_factory=dict)  # by norm, the number at each channel of its input
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


def trace(model: Callable[[], nn.Module], plan: FoldPlan, runs: Sequence[Run], dtype: torch.dtype | None = None
          ) -> tuple[Trace, list[Run], str]:
    """Runs copies of the plan's model in `dtype`; `model` makes one.

    Returns what was seen, the runs that succeeded, and the last error. Raises a RuntimeError if a required run fails.
    """
    axes: dict[str, int] = {}
    for _ in range(4):  # each time, the dimensions of more tokens are known
        tracer, succeeded, why = _Tracer(model(), plan, axes), [], ''
        for run in runs:
            try:
                tracer.run(run, dtype)
                succeeded.append(run)
                if run.is_enough:
                    break
            except Exception as error:  # what was recorded until then is valid
                why = f'{type(error).__name__}: {error}'
                if run.is_required:
                    raise RuntimeError(f'example: the model does not run on it: {why}') from error
        if tracer.trace.axes.items() <= axes.items():
            break
        axes = {**axes, **tracer.trace.axes}
    return tracer.trace, succeeded, why


class _Unseen(TorchDispatchMode):
    """Calls `block` for tagged tensors that an operator gets from code that is no Python, such as TorchScript."""

    def __init__(self, tracer: _Tracer):
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._tracer.depth:
            for tensor in tensors_in((args, kwargs or {})):
                self._tracer.block(tensor, Use('unseen code', func._schema.name))
        return func(*args, **(kwargs or {}))


class _Tracer(TorchFunctionMode):

    def __init__(self, model: nn.Module, plan: FoldPlan, axes: dict[str, int]):
        super().__init__()
        self._model, self._plan, self._axes = model, plan, axes
        self.trace = Trace(Sources())
        self.depth = 0  # of functions that are running
        self._number()
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if name in plan.affines:
                module.forward = self._norm_forward(name, module, module.forward)
            elif name not in plan.norms:
                module.forward = self._module_forward(name, module.forward)
        self._start()

    def _number(self) -> None:
        """Numbers the channels of norms, layers and parameters."""
        tensors = {name: tensor for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]
                   if tensor.dim() and tensor.is_floating_point()}
        sources, embeddings = self.trace.sources, {
            f'{name}.weight' for name, module in self._model.named_modules() if isinstance(module, nn.Embedding)}
        for kind in ('norm', 'written norm'):
            for name, (_, shift) in self._plan.affines.items():
                sources.add(kind, name, shift.numel())
        for name, tensor in tensors.items():
            if tensor.dim() > 1:
                sources.add('layer', name, len(tensor))
            # Rows of a weight; tokens have their channels last, as far as is known.
            wide = [axis for axis, size in enumerate(tensor.shape) if size > 1]
            axis = 0 if tensor.dim() < 3 or name.endswith('weight') else wide[-1] if wide else -1
            axis = self._axes.get(name, tensor.dim() - 1 if name in embeddings else axis % tensor.dim())
            for kind in ('parameter', 'token', *['scaled'] * (wide in ([], [axis]))):
                sources.add(kind, name, tensor.shape[axis], axis)
        sources.finish()
        self._tags = Tags(sources.size)
        for name, tensor in tensors.items():
            source = sources.of['parameter', name]
            tensor.tag = self._tags.along(source.numbers, tensor, source.axis, is_exact=True)
        self._whole = {id(tensor): name for name, tensor in tensors.items()}
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._aliases: dict[str, dict[str, str]] = {}  # of a shared weight by its first name: all, by their modules
        for name, tensor in self._model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(self._whole.get(id(tensor), name), {})[name.rpartition('.')[0]] = name

    def _start(self) -> None:
        self._inside: list[str] = []  # the modules that are being called
        self._is_suspended = False
        self._tagged: list[weakref.ref[Tensor]] = []
        self._scored: list[weakref.ref[Tensor]] = []
        self.depth = 0

    @torch.no_grad()
    def run(self, run: Run, dtype: torch.dtype | None) -> None:
        """One forward pass. Tensors that are alive after it are in its output or stored by the model."""
        try:
            with _Unseen(self), self:
                output = run(self._model, dtype)
            known = set(map(id, tensors_in(output)))
            if any(reference() is not None and id(reference()) not in known for reference in self._tagged):
                gc.collect()  # it may be garbage
            for tensor in filter(lambda tensor: tensor is not None, [reference() for reference in self._tagged]):
                self.block(tensor, Use('output'))
            for tensor in filter(lambda tensor: tensor is not None, [reference() for reference in self._scored]):
                if not tensor.scores.is_softmax:
                    self._note_read(tensor.scores)
            del output
        finally:
            self._start()

    # Modules.

    def _norm_forward(self, name: str, norm: nn.Module, forward: Callable) -> Callable:
        @functools.wraps(forward)
        def wrapped(*args, **kwargs):
            if self._is_suspended:  # a part of another norm
                return forward(*args, **kwargs)
            x, _ = input_of(args, kwargs)
            self._record_call(name)
            self.trace.used.update(f'{name}.{parameter}' for parameter, _ in norm.named_parameters())
            with self._suspended():
                y = forward(*args, **kwargs)
                y = x.view_as(x) if y is x else y  # with a tag of its own
                self._record_norm(name, norm, x, y, channel_axis(norm, kwargs))
            return y

        return wrapped

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        self._is_suspended, was = True, self._is_suspended
        self.depth += 1
        try:
            yield
        finally:
            self._is_suspended = was
            self.depth -= 1

    def _record_call(self, name: str) -> None:
        chain, chains = tuple(self._inside), self._plan.chains
        chains[name] = tuple(commonprefix([chain, chains.get(name, chain)]))

    def _module_forward(self, name: str, forward: Callable) -> Callable:
        @functools.wraps(forward)
        def wrapped(*args, **kwargs):
            self._inside.append(name)
            self.trace.called.add(name)
            try:
                output = forward(*args, **kwargs)
            finally:
                self._inside.pop()
            self._record_return(output)
            return output

        return wrapped

    def _record_return(self, output) -> None:
        """Records the modules that get outputs of norms, or tokens of streams, from a module that they call."""
        chain, receivers = tuple(self._inside), self._plan.receivers
        for tensor in tensors_in(output) if chain else ():
            if getattr(tensor, 'crosses', False) and hasattr(tensor, 'tag'):  # reading a tag takes time
                numbers = tensor.tag.sample()
                for index in self.trace.sources.index[numbers[numbers >= 0]].unique().tolist():
                    source = self.trace.sources.all[index][:2]
                    receivers[source] = tuple(commonprefix([chain, receivers.get(source, chain)]))

    def _record_norm(self, name: str, norm: nn.Module, x: Tensor, y: Tensor, axis: int) -> None:
        self.trace.ran.add(name)
        channels, size = self.trace.sources.of['norm', name].numbers, len(self.trace.sources.of['norm', name].numbers)
        axis = next((dim for dim in (axis, -1, 1) if dim < x.dim() and x.shape[dim] == size), axis)
        if has_act(norm) and not isinstance(norm.act, nn.Identity):
            self._add_use(channels, Use('activation'))
        else:
            self._set(y, self._tags.along(channels, y, axis), crosses=True)
        if not hasattr(x, 'tag'):
            self.trace.not_from_layers.add(name)
            self.trace.reads[name] = [NOTHING] * size
            return
        numbers = x.tag.numbers.movedim(axis, -1).reshape(-1, size)
        self._record_stream_read(name, numbers)
        kinds = {source.kind for source in self._sources_in(numbers)}
        if kinds != {'layer'} or bool((numbers < 0).any()):
            self.trace.not_from_layers.add(name)
            return self.block(x, Use('norm', name, norm=name))
        for pair in (numbers * size + torch.arange(size)).unique().tolist():
            number, channel = divmod(pair, size)
            if self.trace.before.setdefault(number, (name, channel)) != (name, channel):
                self._add_use([number], Use('other norm', name))

    def _record_stream_read(self, name: str, numbers: Tensor) -> None:
        """Records the channels of a residual stream that a norm reads; all its sources are one stream."""
        columns = self._stream_columns(numbers)
        reads = self.trace.reads
        if columns is None or not self._are_same(reads.setdefault(name, columns), columns):
            reads[name] = [MIXED] * numbers.shape[1]
            self._add_use(numbers.unique().tolist(), Use('layouts', name))

    def _stream_columns(self, numbers: Tensor) -> list[int] | None:
        """The number of a source at each column, `NOTHING` for none; None if a column has several channels."""
        written = self._written(numbers)
        channels = self._channels(written)
        least, largest = channels.where(written >= 0, channels.new_tensor(2**60)).amin(0), channels.amax(0)
        if bool(((largest != least) & (largest >= 0)).any()):
            return None
        self._join(self._sources_of(written))
        return written.amax(0).tolist()

    def _are_same(self, columns: list[int], others: list[int]) -> bool:
        """Whether two readings have the same channels; then their sources are one stream."""
        if MIXED in columns or len(columns) != len(others):
            return False
        channel, index = self.trace.sources.channel, self.trace.sources.index
        pairs = [(a, b) for a, b in zip(columns, others, strict=True) if a != b]
        if any(min(a, b) < 0 or channel[a] != channel[b] for a, b in pairs):
            return False
        for a, b in pairs:
            self._join([int(index[a]), int(index[b])])
        return True

    # Functions.

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._is_suspended:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head_attention(func, args, kwargs)
        with self._running():
            output = func(*args, **kwargs)
            tensors = list(tensors_in((args, kwargs)))
            for tensor in tensors:
                if id(tensor) in self._whole:
                    self.trace.used.add(self._whole[id(tensor)])
            if func in _TRAILING:
                self._record_linear(_TRAILING[func], output, *args, **kwargs)
            elif func is F.scaled_dot_product_attention:
                self._record_attention(output, *args, **kwargs)
            else:
                if any(hasattr(tensor, 'scores') for tensor in tensors):
                    self._follow_scores(func, args, kwargs, output)
                elif tagged := [tensor for tensor in tensors if hasattr(tensor, 'tag')]:
                    self._follow(func, args, kwargs, tagged, output)
        return output

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def _follow(self, func, args: tuple, kwargs: dict, tagged: list[Tensor], output) -> None:
        """Tags the outputs of a function that keeps channels; another one is a consumer."""
        name, outputs = getattr(func, '__name__', str(func)), list(tensors_in(output))
        if not outputs and name in SIZES or name in SHAPE_ONLY:
            return
        tags: list[Tag | None] | None = None
        if kwargs.get('out') is not None or not outputs:
            pass
        elif name in SUMS:
            tags = self._sum(name, *args, **kwargs, output=output)
        elif name in PRODUCTS:
            tags = self._product(name, *args, **kwargs, output=output)
        elif name in MATRIX_PRODUCTS:
            tags = self._matrix_product(*args, **kwargs, output=output)
        elif name in CASTS and outputs[0].is_floating_point():  # a tag needs its precision
            tags = [getattr(args[0], 'tag', None)]
        elif name in MOVES:
            tags = self._moved(func, name, args, kwargs, outputs)
            if tags is None and self._unify(tagged, name):
                tags = self._moved(func, name, args, kwargs, outputs)
        if tags is None:
            for tensor in tagged:
                self.block(tensor, Use('function', name))
        elif name in JOINS and args and any(not part.numel() for part in args[0]):
            for tensor in tagged:
                self.block(tensor, Use('empty'))
        elif name == 'pad':
            self._record_padding(*args, **kwargs)
        crosses = any(getattr(tensor, 'crosses', False) for tensor in tagged)
        for tensor, tag in zip(outputs, tags or [None] * len(outputs), strict=True):
            if tag is None:
                tensor.__dict__.pop('tag', None)
            else:
                self._set(tensor, tag, crosses)

    def _moved(self, func, name: str, args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[Tag | None] | None:
        """The tags of a function's outputs, None for an output that does not depend on tagged tensors' values.

        None instead of the list if it computes something else.
        """
        is_copied = any(hasattr(tensor, 'tag') for tensor in outputs)  # an argument, which has perhaps been written to
        try:
            results = [func(*map_tensors(partial(_values, which, is_copied), args),
                            **map_tensors(partial(_values, which, is_copied), kwargs)) for which in (0, 1)]
            pairs = list(zip(*map(tensors_in, results), strict=True))
        except Exception:  # for example a write into an expanded tensor
            return None
        tags = [self._tags.moved(pair) if pair[0].shape == tensor.shape else False
                for pair, tensor in zip(pairs, outputs, strict=True)]
        if False in tags:
            return None
        for tag, tensor in zip(tags, outputs, strict=True):
            # Other values than zeros among the tokens of a stream would have to change with its basis.
            if tag is not None and name in MIXERS and bool((tensor.cpu()[tag.numbers == NOTHING] != 0).any()):
                self._add_use(tag.numbers[tag.numbers >= 0].unique().tolist(), self._use(Use('joined', name)))
        return tags

    def _unify(self, tagged: list[Tensor], name: str) -> bool:
        """Makes what several sources wrote to a tensor one stream with one number a channel, which can be averaged.

        Returns whether there were several.
        """
        if len(tagged) > 1:
            return False
        numbers = tagged[0].tag.numbers
        sources = [self.trace.sources.all[index] for index in self._sources_of(self._written(numbers))]
        if len(sources) < 2 or len({len(source.numbers) for source in sources}) > 1:
            return False
        self._join(self._sources_of(self._written(numbers)))
        self._add_use(numbers[numbers >= 0].unique().tolist(), self._use(Use('sum', name)))
        one = torch.where(numbers >= 0, self._channels(self._written(numbers)) + sources[0].numbers.start, NOTHING)
        tagged[0].tag = self._tags.tag(one, numbers.shape, tagged[0].device)
        return True

    def _sum(self, name: str, input, other, *, alpha=1, output: Tensor) -> list[Tag] | None:
        """Two tensors with the same channels are one residual stream."""
        if not isinstance(other, Tensor):
            return [input.tag] if other == 0 and hasattr(input, 'tag') else None
        if not isinstance(input, Tensor) or not (hasattr(input, 'tag') and hasattr(other, 'tag')):
            return None
        pair = [tensor.tag.numbers.expand(output.shape) for tensor in (input, other)]
        a, b = map(self._written, pair)
        both, channels = (a >= 0) & (b >= 0), list(map(self._channels, (a, b)))
        if not torch.equal(channels[0][both], channels[1][both]):
            self._ask_for_axes(input, other)
            return None
        sources = self.trace.sources
        index = [sources.index[numbers[both]] for numbers in (a, b)]
        for met in (index[0] * len(sources.all) + index[1]).unique().tolist():
            self._join(divmod(met, len(sources.all)))
        for numbers in pair:
            self._add_use(numbers[numbers >= 0].unique().tolist(), self._use(Use('sum', name)))
        return [self._tags.tag(torch.where(a >= 0, a, b), output.shape, output.device)]

    def _ask_for_axes(self, *tensors: Tensor) -> None:
        """Notes that a token, whose channels do not fit, may have them along another dimension."""
        sources = [source for tensor in tensors for source in self._sources_in(tensor.tag.numbers)]
        is_token = [source.kind in ('parameter', 'token') for source in sources]
        sizes = {len(source.numbers) for source, token in zip(sources, is_token, strict=True) if not token}
        for source in (source for source, token in zip(sources, is_token, strict=True) if token):
            shape = self._shapes[source.name]
            fitting = [axis for axis in range(len(shape) - 1, -1, -1) if shape[axis] in sizes]
            if fitting and source.name not in self._axes and fitting[0] != source.axis:
                self.trace.axes[source.name] = fitting[0]

    def _product(self, name: str, input, other=-1., *, rounding_mode=None, output: Tensor) -> list[Tag] | None:
        """A factor that all channels of a token share, or a LayerScale."""
        is_quotient = 'div' in name
        if rounding_mode is not None:
            return None
        x, factor = input, other
        if not is_quotient and hasattr(other, 'tag') and (not hasattr(input, 'tag') or input.numel() < other.numel()):
            x, factor = other, input
        if not hasattr(x, 'tag'):
            return None
        numbers, use = x.tag.numbers.expand(output.shape), self._use(Use('scale', name))
        written = self._written(numbers)
        if not isinstance(factor, Tensor) or factor.numel() == 1:
            pass
        elif not hasattr(factor, 'tag'):
            if not self._is_shared_by_channels(factor, written):
                return None
        else:
            scale = self._sources_in(factor.tag.numbers)
            if is_quotient or len(scale) != 1 or scale[0].kind != 'parameter' or (
                    'scaled', scale[0].name) not in self.trace.sources.of:
                return None
            scaled, factors = self.trace.sources.of['scaled', scale[0].name], factor.tag.numbers.expand(output.shape)
            is_written = written >= 0
            if not torch.equal(self._channels(factors)[is_written], self._channels(written)[is_written]):
                return None
            self.trace.scaled.setdefault(scaled.name, set()).update(self._sources_of(written))
            use = self._use(Use('layer scale', scaled.name))
            self._add_use(factors.unique().tolist(), use)
            written = torch.where(is_written, self._channels(written) + scaled.numbers.start, NOTHING)
        self._add_use(numbers[numbers >= 0].unique().tolist(), use)
        return [self._tags.tag(written, output.shape, output.device)]

    def _is_shared_by_channels(self, factor: Tensor, numbers: Tensor) -> bool:
        """Whether a factor is the same for all channels of a token."""
        channels = self._channels(numbers)
        for axis in range(-factor.dim(), 0):
            if factor.shape[axis] > 1 and factor.stride(axis):
                first = channels.amax(axis, keepdim=True)
                if bool(((channels != first) & (channels >= 0)).any()):
                    return False
        return True

    def _record_padding(self, input: Tensor, pad: Sequence[int], mode: str = 'constant', value=None) -> None:
        module = next((name for name in reversed(self._inside) if name and name in self._plan.fills), None)
        numbers = input.tag.sample().unique().tolist()
        if mode == 'constant':
            for number in numbers:
                self.trace.padded.setdefault(number, set()).add(module)
        if not any(pad):
            self._add_use(numbers, self._use(Use('maybe padded')))

    # Attention.

    def _record_attention(self, y: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask=None, dropout_p=0.,
                          is_causal: bool = False, scale=None, enable_gqa: bool = False) -> None:
        heads = [self._heads(tensor) for tensor in (query, key, value)]
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            heads[1:] = [None if numbers is None else numbers.repeat_interleave(times, -2) for numbers in heads[1:]]
        q, k, v = heads
        scores = None if q is None or k is None or q.shape[-1] != k.shape[-1] else _unique_heads(q, k)
        self._add_attention(scores, v, (query, key), value, y)

    def _multi_head_attention(self, func, args: tuple, kwargs: dict):
        """torch's attention, whose parts no mode sees: four linear layers around `scaled_dot_product_attention`."""
        with self._suspended():
            output = func(*args, **kwargs)
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        a = given.arguments
        with self:
            inputs = [a[name] for name in ('query', 'key', 'value')]
            weights = ([a[f'{name}_proj_weight'] for name in 'qkv'] if a['use_separate_proj_weight'] else
                       a['in_proj_weight'].chunk(3))
            biases = [None] * 3 if a['in_proj_bias'] is None else a['in_proj_bias'].chunk(3)
            q, k, v = (F.linear(x, weight, bias).unflatten(-1, (a['num_heads'], -1)).transpose(0, -2)
                       for x, weight, bias in zip(inputs, weights, biases, strict=True))
            is_plain = a['bias_k'] is a['static_k'] is None and not a['add_zero_attn']
            context = F.scaled_dot_product_attention(q, k, v) if is_plain else (q @ k.mT).exp() @ v
            y = F.linear(context.transpose(0, -2).flatten(-2), a['out_proj_weight'], a['out_proj_bias'])
        self._set(output[0], y.tag, crosses=True)
        return output

    def _heads(self, x: Tensor) -> Tensor | None:
        """For each head, the numbers of its channels, `(..., d)`; None if tokens differ, or they are no layer's."""
        if not hasattr(x, 'tag') or x.dim() < 2 or not x.numel():
            return None
        numbers = x.tag.numbers
        first = numbers[..., :1, :]
        if not torch.equal(numbers, first.expand(numbers.shape)) or bool((first < 0).any()) or (
                {source.kind for source in self._sources_in(first)} != {'layer'}):
            return None
        return first[..., 0, :]

    def _add_attention(self, scores: Tensor | None, v: Tensor | None, read: Sequence[Tensor], value: Tensor,
                       y: Tensor) -> None:
        for tensor, code in (*zip(read, ('query', 'key'), strict=False), (value, 'value')):
            if hasattr(tensor, 'tag'):
                self._add_use(tensor.tag.numbers.unique().tolist(), self._use(Use(code)))
        values = None
        if v is not None:
            values = v.flatten(0, -2).unique(dim=0) if v.dim() > 1 else v[None]
            self._set(y, self._tags.tag(v[..., None, :].expand(*y.shape[:-2], 1, -1), y.shape, y.device))
        half = None if scores is None else scores.shape[1] // 2
        self.trace.attentions.append(Attention(None if half is None else scores[:, :half],
                                               None if half is None else scores[:, half:], values))

    def _matrix_product(self, input: Tensor, other: Tensor, output: Tensor) -> list[Tag | None] | None:
        """Scores of an attention; their products with values are found by `_follow_scores`."""
        if not (hasattr(input, 'tag') and hasattr(other, 'tag')) or min(input.dim(), other.dim()) < 2:
            return None
        with self._suspended():
            keys = other.mT
            if hasattr(other, 'tag'):
                keys.tag = mapped(lambda values: values.mT, other.tag)
        q, k = self._heads(input), self._heads(keys)
        if q is None or k is None:
            return None
        self._add_use(q.unique().tolist(), Use('query'))
        self._add_use(k.unique().tolist(), Use('key'))
        output.scores = Scores(_unique_heads(q, k))
        self._scored.append(weakref.ref(output))
        return [None]

    def _follow_scores(self, func, args: tuple, kwargs: dict, output) -> None:
        name, tensors = getattr(func, '__name__', ''), list(tensors_in((args, kwargs)))
        scored = next(tensor for tensor in tensors if hasattr(tensor, 'scores'))
        others = [tensor for tensor in tensors if tensor is not scored]
        if name in SIZES and not isinstance(output, Tensor):
            return
        is_same = isinstance(output, Tensor) and output.dim() and output.shape[-1] == scored.shape[-1]
        if name in MATRIX_PRODUCTS and scored is args[0] and scored.scores.is_softmax and hasattr(args[1], 'tag'):
            value, scores = args[1], scored.scores
            v = self._heads(value)
            self._add_attention(scores.heads, v, (), value, output)
            return
        if name == 'softmax' and is_same and not scored.scores.is_softmax:
            dim = kwargs.get('dim', args[1] if len(args) > 1 else None)
            if dim in (-1, scored.dim() - 1):
                output.scores = Scores(scored.scores.heads, True)
                return
        elif name in KEEP_SCORES and is_same:
            is_linear = name not in SUMS | PRODUCTS | {'masked_fill', 'masked_fill_', 'where'}
            is_factor = name in PRODUCTS and all(tensor.shape[-1:] in ((), (1, )) for tensor in others)
            if is_linear or not scored.scores.is_softmax and (name not in PRODUCTS or is_factor):
                output.scores = scored.scores
                self._scored.append(weakref.ref(output))
        if not scored.scores.is_softmax and not hasattr(output, 'scores'):
            self._note_read(scored.scores)
        for tensor in others:
            self.block(tensor, Use('function', name))

    def _note_read(self, scores: Scores) -> None:
        self.trace.scores_read.update(scores.heads[:, scores.heads.shape[1] // 2:].flatten().tolist())

    # Layers.

    def _part(self, weight: Tensor) -> tuple[str, int, int] | None:
        """The name of a weight and its rows, [first, end), or None if it is computed."""
        if name := self._whole.get(id(weight)):
            is_rows = self.trace.sources.of['parameter', name].axis == 0
            if not is_rows:
                self.trace.axes[name] = 0
            return (name, 0, len(weight)) if is_rows else None
        if not hasattr(weight, 'tag') or not weight.numel():
            return None
        numbers = weight.tag.numbers.flatten(1)[:, 0].tolist()
        source, first = self.trace.sources.at(numbers[0]) if numbers[0] >= 0 else (None, 0)
        if source is None or source.kind != 'parameter' or source.axis or (
                numbers != list(range(numbers[0], numbers[0] + len(numbers)))):
            return None
        return (source.name, first, first + len(numbers)) if ('layer', source.name) in self.trace.sources.of else None

    def _record_linear(self, trailing: int, y: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None,
                       stride=1, padding=0, dilation=1, groups: int = 1) -> None:
        part = self._part(weight)
        if part is None:
            for tensor in tensors_in([input, weight, bias]):
                self.block(tensor, Use('computed weight'))
            return
        owner, axis = part[0].rpartition('.')[0], input.dim() - 1 - trailing
        if self._inside and self._inside[-1] in self._aliases.get(part[0], ()):  # a shared weight
            owner = self._inside[-1]
        self._record_call(owner)
        # Padding modes such as reflection are separate functions.
        pads = max(weight.shape[2:]) > 1 if padding == 'same' else padding != 'valid' and bool(
            torch.as_tensor(padding).any())
        if trailing and pads:
            kernel = 'x'.join(map(str, weight.shape[2:]))
            self.block(input, Use('padded convolution', owner, kernel))
        has_inputs = hasattr(input, 'tag') and input.numel()
        inputs = self._columns(input, axis, owner) if has_inputs else None
        self._record_layer(part, owner, [NOTHING] * input.shape[axis] if inputs is None else inputs, bias)
        start = self.trace.sources.of['layer', part[0]].numbers.start
        self._set(y, self._tags.along(range(start + part[1], start + part[2]), y, axis), crosses=True)

    def _columns(self, x: Tensor, axis: int, owner: str) -> list[int] | None:
        """The number of the source at each channel of a layer's input, or `NOTHING`; None if it has several."""
        numbers = x.tag.numbers.movedim(axis, -1).reshape(-1, x.shape[axis])
        columns = numbers.amax(0)
        if not bool(((numbers != columns) & (numbers >= 0)).any()) and not bool((numbers == MIXED).any()):
            if bool((numbers != columns).any()):
                self.block(x, Use('mixed', owner))
            return columns.tolist()
        kinds = {source.kind for source in self._sources_in(numbers)}
        if 'norm' not in kinds and (stream := self._stream_columns(numbers)) is not None:
            return stream
        # Several channels at one place, or outputs of a norm and something else.
        self.block(x, Use('mixed' if 'norm' in kinds and len(kinds) > 1 and self._is_each_in_place(numbers) else
                          'dimension', owner))
        return None

    def _is_each_in_place(self, numbers: Tensor) -> bool:
        channels = self._channels(numbers)
        return not bool(((channels != channels.amax(0)) & (channels >= 0)).any())

    def _record_layer(self, part: tuple[str, int, int], owner: str, inputs: list[int], bias: Tensor | None) -> None:
        name, first, end = part
        numbers = bias.tag.numbers.tolist() if hasattr(bias, 'tag') else []
        obstacle = call_obstacle(self._plan.modules[owner])
        rows = [self.trace.sources.at(number) for number in numbers if number >= 0]
        if len(rows) != len(numbers) or any(source.kind != 'parameter' for source, _ in rows) or (
                bias is not None and not numbers):
            obstacle, rows = obstacle or Obstacle('computed bias'), []
        layer = self.trace.layers.get((*part, owner))
        if layer is None:
            sources = self.trace.sources.of
            layer = self.trace.layers[(*part, owner)] = Layer(
                owner, self._aliases.get(name, {}).get(owner, name), (first, end),
                sources['parameter', name].numbers[first:end], sources['layer', name].numbers[first:end], inputs,
                tuple((source.name, index) for source, index in rows), obstacle)
        layer.obstacle = layer.obstacle or obstacle
        if inputs != layer.inputs:
            kinds = {self.trace.sources.at(number)[0].kind for number in (*inputs, *layer.inputs) if number >= 0}
            if 'norm' in kinds or not self._are_same(layer.inputs, inputs):
                self._add_use({*inputs, *layer.inputs}, Use('another input', owner))

    # Tags and uses.

    def _set(self, tensor: Tensor, tag: Tag, crosses: bool = False) -> None:
        is_new = not hasattr(tensor, 'tag')
        tensor.tag, tensor.crosses = tag, crosses
        if is_new:
            self._tagged.append(weakref.ref(tensor))

    def _sources_of(self, numbers: Tensor) -> list[int]:
        """The indices of the sources of these numbers."""
        return self.trace.sources.index[numbers[numbers >= 0]].unique().tolist()

    def _sources_in(self, numbers: Tensor) -> list[Source]:
        return [self.trace.sources.all[index] for index in self._sources_of(numbers)]

    def _written(self, numbers: Tensor) -> Tensor:
        return self.trace.sources.written[numbers.clamp(min=0)].where(numbers >= 0, numbers)

    def _channels(self, numbers: Tensor) -> Tensor:
        return self.trace.sources.channel[numbers.clamp(min=0)].where(numbers >= 0, numbers)

    def _join(self, indices: Sequence[int]) -> None:
        """Makes sources one residual stream."""
        self.trace.joined += [(indices[0], index) for index in indices[1:] if index != indices[0]]

    def _use(self, use: Use) -> Use:
        return use._replace(inside=next(reversed(self._inside), ''))

    def block(self, tensor: Tensor, use: Use) -> None:
        """Records that something other than a layer consumes a tensor."""
        if hasattr(tensor, 'tag'):
            numbers = tensor.tag.sample()
            self._add_use(numbers[numbers >= 0].unique().tolist(), self._use(use))

    def _add_use(self, numbers: Iterable[int], use: Use) -> None:
        for number in numbers:
            known = self.trace.uses.setdefault(number, [])
            if use not in known:
                known.append(use)


def _unique_heads(q: Tensor, k: Tensor) -> Tensor:
    """Pairs of queries' and keys' numbers, `(heads, 2 d)`."""
    shape = torch.broadcast_shapes(q.shape[:-1], k.shape[:-1])
    pairs = torch.cat([numbers.expand(*shape, -1) for numbers in (q, k)], -1)
    return pairs.flatten(0, -2).unique(dim=0) if pairs.dim() > 1 else pairs[None]


def _values(which: int, is_copied: bool, tensor: Tensor) -> Tensor:
    """A tag's values. Those of another tensor are shifted, so that 0 and 1 are nothing special."""
    if hasattr(tensor, 'tag'):
        values = (tensor.tag.first, tensor.tag.second)[which]
        return values.clone() if is_copied else values
    return tensor + 0.37 if tensor.is_floating_point() else tensor
