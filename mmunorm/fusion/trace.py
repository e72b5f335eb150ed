"""Step 1 of folding: a run on tagged tensors, which shows what consumes each norm, layer and parameter.

Beside each output of a norm or layer, and each parameter, goes its tag (see `tags`), from which layers read the
channels that they consume. Only the functions listed in `operators` keep a tag. Any other one is a consumer that
prevents folding, whatever it computes on the example: a comparison or a top-k would see other values in a folded model.
So the result holds for all inputs of the code paths that the examples take. Step 3 compares outputs, so this step need
not see all: a bias that is shared, or a write to the input of a norm.
"""
from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os.path import commonprefix

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..modules import map_tensors, tensors_in
from ..norms.layers import channel_axis, input_of
from .examples import Run
from .folds import Use
from .obstacles import Obstacle
from .operators import CASTS, JOINS, MATRIX_PRODUCTS, MIXERS, MOVES, PRODUCTS, SHAPE_ONLY, SIZES, SUMS
from .plan import FoldPlan, call_obstacle
from .recorder import Layer, Recorder, Trace
from .tags import MIXED, NOTHING, Numbers, Tag, unrepeated

_TRAILING = {F.linear: 0, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}  # dimensions after the channels


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
                if not any(other.is_required for other in runs):
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
        if not self._tracer.is_suspended and not self._tracer.depth:
            self._tracer.block(Use('unseen code', func._schema.name), *tensors_in((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


class _Tracer(Recorder):

    def __init__(self, model: nn.Module, plan: FoldPlan, axes: dict[str, int]):
        super().__init__(plan)
        self._model, self._axes = model, axes
        self._number()
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if name in plan.affines:
                module.forward = self._norm_forward(name, module, module.forward)
            elif name not in plan.norms:
                module.forward = self._module_forward(name, module.forward)

    def _number(self) -> None:
        """Numbers the channels of norms, layers and parameters."""
        tensors = {name: tensor for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]
                   if tensor.dim() and tensor.is_floating_point()}
        sources, embeddings = self._sources, {
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
        for name, tensor in tensors.items():
            source = sources.of['parameter', name]
            tensor.tag = self._along(source.numbers, tensor, source.axis)
        self._whole = {id(tensor): name for name, tensor in tensors.items()}
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._aliases: dict[str, dict[str, str]] = {}  # of a shared weight by its first name: all, by their modules
        for name, tensor in self._model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(self._whole.get(id(tensor), name), {})[name.rpartition('.')[0]] = name

    @torch.no_grad()
    def run(self, run: Run, dtype: torch.dtype | None) -> None:
        """One forward pass. Tensors that are alive after it are in its output or stored by the model."""
        try:
            with _Unseen(self), self:
                output = run(self._model, dtype)
            known = set(map(id, tensors_in(output)))
            if any(reference() is not None and id(reference()) not in known for reference in self._tagged):
                gc.collect()  # it may be garbage
            self.block(Use('output'), *(reference() for reference in self._tagged))
            for tensor in filter(lambda tensor: tensor is not None, [reference() for reference in self._scored]):
                self._note_read(tensor.scores)
            del output
        finally:
            self._start()

    # Modules.

    def _norm_forward(self, name: str, norm: nn.Module, forward: Callable) -> Callable:
        @functools.wraps(forward)
        def wrapped(*args, **kwargs):
            if self.is_suspended:  # a part of another norm
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
        self.is_suspended, was = True, self.is_suspended
        try:
            yield
        finally:
            self.is_suspended = was

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
            with self._suspended():
                self._record_return(output)
            return output

        return wrapped

    def _record_return(self, output) -> None:
        """Records the modules that get outputs of norms, or tokens of streams, from a module that they call."""
        chain, receivers = tuple(self._inside), self._plan.receivers
        for tensor in tensors_in(output) if chain else ():
            if getattr(tensor, 'crosses', False) and hasattr(tensor, 'tag'):
                for kind, name, *_ in self._sources.among(tensor.tag.found):
                    receivers[kind, name] = tuple(commonprefix([chain, receivers.get((kind, name), chain)]))

    def _record_norm(self, name: str, norm: nn.Module, x: Tensor, y: Tensor, axis: int) -> None:
        channels = self._sources.of['norm', name].numbers
        size = len(channels)
        axis = next((dim for dim in (axis, -1, 1) if dim < x.dim() and x.shape[dim] == size), axis)
        self._set(y, self._along(channels, y, axis), crosses=True)
        if not hasattr(x, 'tag'):
            self.trace.not_from_layers.add(name)
            self.trace.reads[name] = [NOTHING] * size
            return
        numbers, reads = self._tokens(x, axis), self.trace.reads
        columns = self._stream_columns(numbers)
        if columns is None or not self._are_same(reads.setdefault(name, columns), columns):
            reads[name] = [MIXED] * size
            self._add_use(numbers, Use('layouts', name))
        if self._sources.kinds(numbers) != {'layer'} or bool((numbers < 0).any()):
            self.trace.not_from_layers.add(name)
            return self.block(Use('norm', name, norm=name), x)
        for pair in np.unique(numbers * size + np.arange(size)).tolist():
            number, channel = divmod(pair, size)
            if self.trace.before.setdefault(number, (name, channel)) != (name, channel):
                self._add_use([number], Use('other norm', name))

    def _stream_columns(self, numbers: Numbers) -> list[int] | None:
        """The number of a source at each column, `NOTHING` for none, or None if a column has several channels. All
        sources are one stream from now on."""
        written = self._sources.written[numbers]
        if MIXED in written or not _is_same(self._sources.channel[written]):
            return None
        self._join(written)
        return written.max(0).tolist()

    def _are_same(self, columns: list[int], others: list[int]) -> bool:
        """Whether two readings have the same channels; then their sources are one stream."""
        if MIXED in columns or len(columns) != len(others):
            return False
        channel = self._sources.channel
        pairs = [(a, b) for a, b in zip(columns, others, strict=True) if a != b]
        if any(min(a, b) < 0 or channel[a] != channel[b] for a, b in pairs):
            return False
        for pair in pairs:
            self._join(pair)
        return True

    # Functions.

    @torch.compiler.disable  # torch 2.1 compiles it where it is called by compiled code
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.is_suspended:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head_attention(func, args, kwargs)
        self.depth += 1
        try:
            output = func(*args, **kwargs)
            tensors, name = list(tensors_in((args, kwargs))), getattr(func, '__name__', str(func))
            self.trace.used.update(self._whole[id(tensor)] for tensor in tensors if id(tensor) in self._whole)
            if func in _TRAILING:
                self._record_linear(_TRAILING[func], output, *args, **kwargs)
            elif func is F.scaled_dot_product_attention:
                self._record_attention(output, *args, **kwargs)
            elif any(hasattr(tensor, 'scores') for tensor in tensors):
                self._follow_scores(name, args, kwargs, tensors, output)
            elif tagged := [tensor for tensor in tensors if hasattr(tensor, 'tag')]:
                self._follow(func, name, args, kwargs, tagged, output)
            return output
        finally:
            self.depth -= 1

    def _follow(self, func: Callable, name: str, args: tuple, kwargs: dict, tagged: list[Tensor], output) -> None:
        """Tags the outputs of a function that keeps channels; another one is a consumer."""
        outputs = list(tensors_in(output))
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
            self.block(Use('function', name), *tagged)
        elif name in JOINS and args and any(not part.numel() for part in args[0]):
            self.block(Use('empty'), *tagged)
        elif name == 'pad':
            self._record_padding(*args, **kwargs)
        crosses = any(getattr(tensor, 'crosses', False) for tensor in tagged)
        for tensor, tag in zip(outputs, tags or [None] * len(outputs), strict=True):
            if tag is None:
                tensor.__dict__.pop('tag', None)
            else:
                self._set(tensor, tag, crosses)

    def _moved(self, func, name: str, args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[Tag | None] | None:
        """The tags of a function's outputs, None for one that depends on no tag; None if it does not move elements."""
        is_copied = any(hasattr(tensor, 'tag') for tensor in outputs)  # an argument, which has perhaps been written to
        try:
            calls = [map_tensors(partial(_values, which, is_copied), (args, kwargs)) for which in (0, 1)]
            pairs = list(zip(*(tensors_in(func(*args, **kwargs)) for args, kwargs in calls), strict=True))
        except Exception:  # for example a write into an expanded tensor
            return None
        tags: list[Tag | None] = []
        for (a, b), tensor in zip(pairs, outputs, strict=True):
            if not a.shape == b.shape == tensor.shape:
                return None
            tag = None if a.dtype == b.dtype and torch.equal(a, b) else Tag(self._sources, pair=(a, b))
            if tag is not None and (not a.dtype == b.dtype == torch.float64 or MIXED in tag.sample):
                return None
            tags.append(tag)
        for tag, tensor in zip(tags, outputs, strict=True):
            # Other values than zeros among the tokens of a stream would have to change with its basis.
            if tag is not None and name in MIXERS and bool(
                    tensor.cpu()[torch.from_numpy(tag.numbers == NOTHING)].any()):
                self._add_use(tag.numbers, Use('joined', name))
        return tags

    def _unify(self, tagged: list[Tensor], name: str) -> bool:
        """Whether several sources wrote to a tensor. They are one stream, whose channels can then be averaged."""
        numbers = tagged[0].tag.numbers
        written = self._sources.written[numbers]
        sources = self._sources.among(written)
        sizes = {len(source.numbers) for source in sources}
        if len(tagged) > 1 or MIXED in numbers or len(sources) < 2 or len(sizes) > 1:
            return False
        self._add_use(numbers, Use('sum', name))
        tagged[0].tag = Tag(self._sources, self._stream(written))
        return True

    def _sum(self, name: str, input, other, *, alpha=1, output: Tensor) -> list[Tag] | None:
        """Two tensors with the same channels are one residual stream, whose sources belong together from now on."""
        if not isinstance(other, Tensor):
            return [input.tag] if other == 0 and hasattr(input, 'tag') else None
        if not isinstance(input, Tensor) or not (hasattr(input, 'tag') and hasattr(other, 'tag')):
            return None
        pair = unrepeated(*(np.broadcast_to(tensor.tag.numbers, output.shape) for tensor in (input, other)))
        a, b = (self._sources.written[numbers] for numbers in pair)
        both = (a >= 0) & (b >= 0)
        if bool((self._sources.channel[a] != self._sources.channel[b])[both].any()):
            self._ask_for_axes(input, other)
            return None
        if MIXED in a or MIXED in b:  # which a sample can miss
            return None
        for numbers in pair:
            self._add_use(numbers, Use('sum', name))
        self._join(np.stack([a, b]))
        return [Tag(self._sources, np.broadcast_to(self._stream(np.where(a >= 0, a, b)), output.shape))]

    def _ask_for_axes(self, *tensors: Tensor) -> None:
        """Notes that a token, whose channels do not fit, may have them along another dimension."""
        sources = [source for tensor in tensors for source in self._sources.among(tensor.tag.numbers)]
        tokens = [source for source in sources if source.kind in ('parameter', 'token')]
        sizes = {len(source.numbers) for source in sources if source not in tokens}
        for source in tokens:
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
        use, tags = Use('scale', name), (x.tag, getattr(factor, 'tag', x.tag))
        numbers, factors = unrepeated(*(np.broadcast_to(tag.numbers, output.shape) for tag in tags))
        written, channel = self._sources.written[numbers], self._sources.channel
        if MIXED in written:
            return None
        if not isinstance(factor, Tensor) or factor.numel() == 1:
            pass
        elif not hasattr(factor, 'tag'):
            axes = [axis for axis in range(-factor.dim(), 0) if factor.shape[axis] > 1 and factor.stride(axis)]
            if not all(_is_same(channel[written], axis) for axis in axes):  # it differs between channels of a token
                return None
        else:
            scale = self._sources.among(factors)
            if is_quotient or len(scale) != 1 or scale[0].kind != 'parameter' or (
                    'scaled', scale[0].name) not in self._sources.of:
                return None
            scaled, is_written = self._sources.of['scaled', scale[0].name], written >= 0
            if not np.array_equal(channel[factors[is_written]], channel[written[is_written]]):
                return None
            self.trace.scaled.setdefault(scaled.name, set()).update(self._sources.indices(written))
            use = Use('layer scale', scaled.name)
            self._add_use(factors, use)
            written = np.where(is_written, channel[written] + scaled.numbers.start, NOTHING)
        self._add_use(numbers, use)
        return [Tag(self._sources, np.broadcast_to(written, output.shape))]

    def _record_padding(self, input: Tensor, pad: Sequence[int], mode: str = 'constant', value=None) -> None:
        module = next((name for name in reversed(self._inside) if name and name in self._plan.fills), None)
        if mode == 'constant':
            for number in input.tag.found:
                self.trace.padded.setdefault(number, set()).add(module)
        if not any(pad):
            self.block(Use('maybe padded'), input)

    # Layers.

    def _part(self, weight: Tensor) -> tuple[str, int, int] | None:
        """The name of a weight and its rows, [first, end), or None if it is computed."""
        if name := self._whole.get(id(weight)):
            if self._sources.of['parameter', name].axis == 0:
                return name, 0, len(weight)
            self.trace.axes[name] = 0
            return None
        if not hasattr(weight, 'tag') or not weight.numel():
            return None
        numbers = weight.tag.numbers.reshape(len(weight), -1)[:, 0].tolist()
        source, first = self._sources.at(numbers[0]) if numbers[0] >= 0 else (None, 0)
        if source is None or source.kind != 'parameter' or source.axis or (
                numbers != list(range(numbers[0], numbers[0] + len(numbers)))):
            return None
        return (source.name, first, first + len(numbers)) if ('layer', source.name) in self._sources.of else None

    def _record_linear(self, trailing: int, y: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None,
                       stride=1, padding=0, dilation=1, groups: int = 1) -> None:
        part = self._part(weight)
        if part is None:
            return self.block(Use('computed weight'), input, weight, bias)
        owner, axis = part[0].rpartition('.')[0], input.dim() - 1 - trailing
        if self._inside and self._inside[-1] in self._aliases.get(part[0], ()):  # a shared weight
            owner = self._inside[-1]
        self._record_call(owner)
        # Padding modes such as reflection are separate functions.
        pads = max(weight.shape[2:]) > 1 if padding == 'same' else padding != 'valid' and bool(
            torch.as_tensor(padding).any())
        if trailing and pads:
            self.block(Use('padded convolution', owner, 'x'.join(map(str, weight.shape[2:]))), input)
        inputs = self._columns(input, axis, owner) if hasattr(input, 'tag') and input.numel() else None
        self._record_layer(part, owner, inputs or [NOTHING] * input.shape[axis], bias)
        outputs = self._sources.of['layer', part[0]].numbers[part[1]:part[2]]
        self._set(y, self._along(outputs, y, axis), crosses=True)

    def _columns(self, x: Tensor, axis: int, owner: str) -> list[int] | None:
        """The number of the source at each channel of a layer's input, or `NOTHING`; None if it has several."""
        numbers = self._tokens(x, axis)
        columns = numbers.max(0)
        if _is_same(numbers) and MIXED not in numbers:
            if bool((numbers != columns).any()):
                self.block(Use('mixed', owner), x)
            return columns.tolist()
        kinds = self._sources.kinds(numbers)
        if 'norm' not in kinds and (stream := self._stream_columns(numbers)) is not None:
            return stream
        # Several channels at one place, or outputs of a norm and something else.
        is_mixed = 'norm' in kinds and len(kinds) > 1 and _is_same(self._sources.channel[numbers])
        self.block(Use('mixed' if is_mixed else 'dimension', owner), x)
        return None

    def _record_layer(self, part: tuple[str, int, int], owner: str, inputs: list[int], bias: Tensor | None) -> None:
        name, first, end = part
        numbers = bias.tag.numbers.tolist() if hasattr(bias, 'tag') else []
        obstacle = call_obstacle(self._plan.modules[owner])
        rows = [self._sources.at(number) for number in numbers if number >= 0]
        if len(rows) != len(numbers) or any(source.kind != 'parameter' for source, _ in rows) or (
                bias is not None and not numbers):
            obstacle, rows = obstacle or Obstacle('computed bias'), []
        weights, outputs = (self._sources.of[kind, name].numbers[first:end] for kind in ('parameter', 'layer'))
        layer = self.trace.layers.setdefault((*part, owner), Layer(
            owner, self._aliases.get(name, {}).get(owner, name), (first, end), weights, outputs, inputs,
            tuple((source.name, index) for source, index in rows), obstacle))
        layer.obstacle = layer.obstacle or obstacle
        if inputs != layer.inputs and ('norm' in self._sources.kinds([*inputs, *layer.inputs])
                                       or not self._are_same(layer.inputs, inputs)):
            self._add_use({*inputs, *layer.inputs}, Use('another input', owner))


def _is_same(numbers: Numbers, axis: int = 0) -> bool:
    """Whether numbers are the same along a dimension, except where there are none."""
    return not bool(((numbers != numbers.max(axis, keepdims=True)) & (numbers >= 0)).any())


def _values(which: int, is_copied: bool, tensor: Tensor) -> Tensor:
    """A tag's values. Those of another tensor are shifted, so that 0 and 1 are nothing special."""
    if hasattr(tensor, 'tag'):
        values = tensor.tag.pair[which].to(tensor.device)
        return values.clone() if is_copied else values
    return tensor + 0.37 if tensor.is_floating_point() else tensor
