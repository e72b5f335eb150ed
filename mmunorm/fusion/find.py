"""Step 1 of folding: finds the layers that consume each norm, or the layers before it, by a run on dyed tensors.

The run computes what the model computes. Beside each output of a norm or layer, and each parameter, go its twins of
dye (see `dye`). Linear layers and convolutions read from them which channels they consume; another function that does
more than move or average elements is a consumer that prevents folding. The result holds for the code path that the
example takes. Step 3 compares outputs, so this step need not see all: the inside of a scripted module, a bias that is
shared or not used, a write to the input of a norm.
"""
from __future__ import annotations

import gc
import inspect
import re
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..compat import is_compiling
from ..modules import map_tensors, tensors_in
from ..norms.layers import channel_axis, input_of
from .affine import has_act, statistic_of
from .dye import MIXED, NOTHING, Dyes, Twins
from .examples import Run
from .joint import Consumer, JointFold
from .partial_calls import running_methods
from .plan import FoldPlan, call_obstacle
from .report import Fold, Site

_TRAILING = {F.linear: 0, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}  # dimensions after the channels
_JOINS = frozenset({'cat', 'concat', 'concatenate', 'stack', 'hstack', 'vstack', 'dstack'})
_CASTS = frozenset({'to', 'float', 'double', 'half', 'bfloat16', 'type', 'type_as'})
_EXITS = frozenset({'numpy', '__array__', 'tolist', 'item', '__dlpack__', 'data_ptr', 'storage', 'untyped_storage',
                    '__deepcopy__', '__reduce_ex__'})
_SHAPE_ONLY = frozenset({'empty_like', 'new_empty', 'rand_like', 'randn_like', 'randint_like'})
_WRITES = re.compile(r'(?!detach_|requires_grad_).*[^_]_|__(i[a-z]+|setitem|set)__')
# Its parts are seen only if it does not ask for modes, such as ours.
_ATTENTION = FunctionType(F.multi_head_attention_forward.__code__,
                          {**vars(F), 'has_torch_function': lambda tensors: False},
                          argdefs=F.multi_head_attention_forward.__defaults__)


@dataclass(eq=False)
class _Layer:
    """A linear operator of the run, identified by its weight, or by some rows of a weight."""
    owner: str  # full name of the module that holds the weight
    weight: str  # full name of the weight
    rows: tuple[int, int]  # the rows of the weight that are the operator's, [first, end)
    weights: range  # the numbers of these rows
    outputs: range  # the numbers of its output channels
    inputs: list[int]  # the number of a norm's channel at each channel of its input, or -1; the same in each call
    bias: tuple[tuple[str, int], ...]  # for each row, the vector that holds its bias and the index in it
    problem: str  # why no norm can be folded into it, as half a sentence, or ''


def find(model: nn.Module, plan: FoldPlan, runs: Sequence[Run], dtype: torch.dtype | None = None
         ) -> tuple[list[Fold], list[Run], str]:
    """The fold of each norm of a plan. Runs `model`, a copy of the plan's in `dtype`, which must not be used again.

    Returns the folds, the runs that succeeded, and the last error. Raises a RuntimeError if a required run fails.
    """
    finder, succeeded, why = _Finder(model, plan), [], ''
    for run in runs:
        try:
            finder.run(run, dtype)
            succeeded.append(run)
            if run.is_enough:
                break
        except Exception as error:  # what was recorded until then is valid
            why = f'{type(error).__name__}: {error}'
            if run.is_required:
                raise RuntimeError(f'example: the model does not run on it: {why}') from error
    return [finder.fold(name) for name in plan.norms], succeeded, why


class _Finder(TorchFunctionMode):

    def __init__(self, model: nn.Module, plan: FoldPlan):
        super().__init__()
        self._model, self._plan = model, plan
        self._ran: set[str] = set()  # norms
        self._not_from_layers: set[str] = set()  # norms whose input is not only the output of layers
        self._layers: dict[tuple[str, int, int, str], _Layer] = {}  # by weight, rows and owner
        self._consumers: dict[int, list[Consumer]] = {}  # other than layers, by number
        self._padded: dict[int, set[str | None]] = {}  # by number, the modules that pad; None for one that cannot fill
        self._sources: dict[int, tuple[str, int]] = {}  # by number of a layer's output: the norm and its channel
        self._number()
        for name, module in model.named_modules():
            if name in plan.affines:
                module.forward = self._norm_forward(name, module, module.forward)
            elif name not in plan.norms:
                module.forward = self._module_forward(name, module.forward)
        self._start()

    def _number(self) -> None:
        """Numbers the channels of norms, the outputs of layers, and the rows of parameters."""
        size = 0

        def next_numbers(count: int) -> range:
            nonlocal size
            size += count
            return range(size - count, size)

        tensors = {name: tensor for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]
                   if tensor.dim() and tensor.is_floating_point()}
        self._channels = {name: next_numbers(shift.numel()) for name, (_, shift) in self._plan.affines.items()}
        self._first_output = size
        self._norm_of = [name for name, channels in self._channels.items() for _ in channels]
        self._outputs = {name: next_numbers(len(tensor)) for name, tensor in tensors.items() if tensor.dim() > 1}
        self._rows = {name: next_numbers(len(tensor)) for name, tensor in tensors.items()}
        self._starts = [(rows.start, name) for name, rows in self._rows.items() if rows]
        self._dyes = Dyes(size)
        for name, tensor in tensors.items():
            tensor.dye = self._dyes.rows(self._rows[name], tensor)
        self._whole = {id(tensor): name for name, tensor in tensors.items()}
        self._aliases: dict[str, dict[str, str]] = {}  # of a shared weight by its first name: all, by their modules
        for name, tensor in self._model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(self._whole.get(id(tensor), name), {})[name.rpartition('.')[0]] = name

    def _start(self) -> None:
        self._inside: list[str] = []  # the modules that are being called
        self._is_suspended = False
        self._dyed: list[weakref.ref[Tensor]] = []

    @torch.no_grad()
    def run(self, run: Run, dtype: torch.dtype | None) -> None:
        """One forward pass. Tensors that are alive after it are in its output or stored by the model."""
        try:
            with self:
                output = run(self._model, dtype)
            known = set(map(id, tensors_in(output)))
            if any(reference() is not None and id(reference()) not in known for reference in self._dyed):
                gc.collect()  # it may be garbage
            for tensor in filter(lambda tensor: tensor is not None, [reference() for reference in self._dyed]):
                self._block(tensor, 'is an output of the model, or stored by it')
            del output
        finally:
            self._start()

    def _norm_forward(self, name: str, norm: nn.Module, forward: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            if self._is_suspended:  # a part of another norm
                return forward(*args, **kwargs)
            x, _ = input_of(args, kwargs)
            self._record_call(name, _calling_function())
            self._is_suspended = True
            try:
                y = forward(*args, **kwargs)
                y = x.view_as(x) if y is x else y  # with a dye of its own
                self._record_norm(name, norm, x, y, channel_axis(norm, kwargs))
            finally:
                self._is_suspended = False
            return y

        return wrapped

    def _record_call(self, name: str, function: str = 'forward') -> None:
        chain, chains = (*self._chain(), *[f'{function}()'] * (function != 'forward')), self._plan.chains
        chains[name] = commonprefix([chain, chains.get(name, chain)])

    def _chain(self) -> tuple[str, ...]:
        """The modules that are being called; the first is the model if any of its methods is running."""
        if self._inside[:1] == ['']:
            self._plan.methods['forward'] = None
            return tuple(self._inside)
        methods = [method for module, method in running_methods() if module is self._model]
        self._plan.methods.update(dict.fromkeys(methods[-1:]))
        return (*[''] * bool(methods), *self._inside)

    def _record_norm(self, name: str, norm: nn.Module, x: Tensor, y: Tensor, axis: int) -> None:
        self._ran.add(name)
        channels, why = self._channels[name], f'is consumed by the norm {name}'
        size = len(channels)
        axis = next((dim for dim in (axis, -1, 1) if dim < x.dim() and x.shape[dim] == size), axis)
        if has_act(norm) and not isinstance(norm.act, nn.Identity):
            self._block_numbers(channels, Consumer('goes through its activation'))
        else:
            self._dye(y, self._dyes.twins(channels, y, axis), is_of_norm=True)
        numbers = self._dyes.read(x.dye).movedim(axis, -1).cpu() if hasattr(x, 'dye') else torch.tensor(NOTHING)
        if bool(((numbers < self._first_output) | (numbers >= self._starts[0][0])).any()):
            self._not_from_layers.add(name)
            return self._block(x, why, norm=name)
        for pair in (numbers * size + torch.arange(size)).unique().tolist():
            number, channel = divmod(pair, size)
            if self._sources.setdefault(number, (name, channel)) != (name, channel):
                self._block_numbers([number], Consumer(f'{why} and by another, or as several channels'))

    def _module_forward(self, name: str, forward: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            self._inside.append(name)
            try:
                output = forward(*args, **kwargs)
            finally:
                self._inside.pop()
            self._record_return(output)
            return output

        return wrapped

    def _record_return(self, output) -> None:
        """Records the modules that get the outputs of norms from a module that they call."""
        chain, chains = self._chain(), self._plan.receivers
        for tensor in tensors_in(output) if chain else ():
            if hasattr(tensor, 'dye') and getattr(tensor, 'is_of_norm', False):  # reading dye takes time
                for number in self._dyes.sample(tensor.dye).unique().tolist():
                    if 0 <= number < self._first_output:
                        norm = self._norm_of[number]
                        chains[norm] = commonprefix([chain, chains.get(norm, chain)])

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._is_suspended:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _ATTENTION(*args, **kwargs)
        output = func(*args, **kwargs)
        if func in _TRAILING:
            self._record_linear(_TRAILING[func], output, *args, **kwargs)
        elif dyed := [tensor for tensor in tensors_in((args, kwargs)) if hasattr(tensor, 'dye')]:
            self._follow(func, args, kwargs, dyed, output)
        return output

    def _follow(self, func, args: tuple, kwargs: dict, dyed: list[Tensor], output) -> None:
        """Dyes the outputs of a function that moves or averages elements; another one is a consumer."""
        name, outputs = getattr(func, '__name__', str(func)), list(tensors_in(output))
        if name in _EXITS or _WRITES.fullmatch(name) or kwargs.get('out') is not None:
            twins = None
        elif not outputs or name in _SHAPE_ONLY:  # a size or a type
            return
        elif name in _CASTS and outputs[0].is_floating_point():  # dye needs its precision
            twins = [getattr(args[0], 'dye', None)]
        else:
            twins = self._twins(func, args, kwargs, outputs)
        if twins is None:
            for tensor in dyed:
                self._block(tensor, f'is consumed by {name}')
        elif name in _JOINS and args and any(not part.numel() for part in args[0]):
            for tensor in dyed:
                self._block(tensor, 'is concatenated with an empty tensor, which may not be empty at another size')
        elif name == 'pad':
            self._record_padding(*args, **kwargs)
        for tensor, dye in zip(outputs, twins or [None] * len(outputs), strict=True):
            if dye is None:
                tensor.__dict__.pop('dye', None)
            elif not hasattr(tensor, 'dye'):  # it may be an argument
                self._dye(tensor, dye, any(getattr(tensor, 'is_of_norm', False) for tensor in dyed))

    def _twins(self, func, args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[Twins | None] | None:
        """The twins of a function's outputs, None for an output that does not depend on dyed tensors' values.

        None instead of the list if it computes something else.
        """
        is_copied = any(hasattr(tensor, 'dye') for tensor in outputs)  # an argument, which has perhaps been written to
        try:
            results = [func(*map_tensors(partial(_twin, number, is_copied), args),
                            **map_tensors(partial(_twin, number, is_copied), kwargs)) for number in (0, 1)]
            pairs = list(zip(*map(tensors_in, results), strict=True))
        except Exception:  # for example a write into an expanded tensor
            return None
        states = [self._dyes.is_moved(pair) if pair[0].shape == tensor.shape else False
                  for pair, tensor in zip(pairs, outputs, strict=True)]
        return None if False in states else [pair if state else None for pair, state in zip(pairs, states, strict=True)]

    def _record_padding(self, input: Tensor, pad: Sequence[int], mode: str = 'constant', value=None) -> None:
        module = next(filter(self._plan.fills.__contains__, reversed(self._inside)), None)
        if mode == 'constant':
            for number in self._dyes.sample(input.dye).unique().tolist():
                self._padded.setdefault(number, set()).add(module)
        if not any(pad):
            self._block(input, 'is padded by 0 at this input size, and may be padded at another', True)

    def _dye(self, tensor: Tensor, twins: Twins, is_of_norm: bool = False) -> None:
        tensor.dye, tensor.is_of_norm = twins, is_of_norm
        self._dyed.append(weakref.ref(tensor))

    def _block(self, tensor: Tensor, why: str, is_padding: bool = False, norm: str = '') -> None:
        """Records that something other than a layer consumes a tensor."""
        if hasattr(tensor, 'dye'):
            consumer = Consumer(why, is_padding, next(reversed(self._inside), ''), norm)
            self._block_numbers(self._dyes.sample(tensor.dye).unique().tolist(), consumer)

    def _block_numbers(self, numbers: Iterable[int], consumer: Consumer) -> None:
        for number in numbers:
            known = self._consumers.setdefault(number, [])
            if consumer not in known:
                known.append(consumer)

    def _row(self, number: int) -> tuple[str, int]:
        """The parameter and the row that have a number."""
        start, name = self._starts[bisect_right(self._starts, number, key=lambda start: start[0]) - 1]
        return name, number - start

    def _part(self, weight: Tensor) -> tuple[str, int, int] | None:
        """The name of a weight and its rows, [first, end), or None if it is computed."""
        if name := self._whole.get(id(weight)):
            return name, 0, len(weight)
        if not hasattr(weight, 'dye') or not weight.numel():
            return None
        numbers = self._dyes.read(tuple(twin.flatten(1)[:, 0] for twin in weight.dye)).tolist()
        if numbers[0] < self._starts[0][0] or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            return None
        name, first = self._row(numbers[0])
        return (name, first, first + len(numbers)) if name in self._outputs else None

    def _record_linear(self, trailing: int, y: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None,
                     stride=1, padding=0, dilation=1, groups: int = 1) -> None:
        part = self._part(weight)
        if part is None:
            for tensor in tensors_in([input, weight, bias]):
                self._block(tensor, 'is consumed by a layer with a computed weight')
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
            self._block(input, f'is consumed by {owner}, a {kernel} convolution that pads with zeros')
        inputs = self._columns(input, axis, owner) if hasattr(input, 'dye') and input.numel() else None
        self._record_layer(part, owner, [NOTHING] * input.shape[axis] if inputs is None else inputs.tolist(), bias)
        start = self._outputs[part[0]].start
        self._dye(y, self._dyes.twins(range(start + part[1], start + part[2]), y, axis))

    def _columns(self, x: Tensor, axis: int, owner: str) -> Tensor | None:
        """The number of a norm's channel at each channel of a layer's input, or `NOTHING`; None if it has several."""
        numbers = self._dyes.read(x.dye).movedim(axis, -1).reshape(-1, x.shape[axis])
        is_other = numbers >= self._first_output
        self._block_numbers(numbers[is_other].unique().tolist(), Consumer(f'is consumed by {owner}'))
        numbers[is_other] = NOTHING
        columns = numbers.amax(0)
        if bool(((numbers != columns) & (numbers != NOTHING) | (numbers == MIXED)).any()):
            self._block(x, f'is consumed by {owner} along another dimension than its channels, or averaged with other '
                        'values')
            return None
        if bool((numbers != columns).any()):
            self._block(x, f'is consumed by {owner} together with other values, such as padding', True)
        return columns

    def _record_layer(self, part: tuple[str, int, int], owner: str, inputs: list[int], bias: Tensor | None) -> None:
        name, first, end = part
        numbers = self._dyes.read(bias.dye).tolist() if hasattr(bias, 'dye') else []
        problem = call_obstacle(self._plan.modules[owner])
        if any(number < self._starts[0][0] for number in numbers) or (bias is not None and not numbers):
            problem, numbers = problem or 'has a bias that is not made of parameters alone', []
        layer = self._layers.get((*part, owner))
        if layer is None:
            layer = self._layers[(*part, owner)] = _Layer(
                owner, self._aliases.get(name, {}).get(owner, name), (first, end), self._rows[name][first:end],
                self._outputs[name][first:end], inputs, tuple(map(self._row, numbers)), problem)
        layer.problem = layer.problem or problem
        if inputs != layer.inputs:
            why = Consumer(f'is consumed by {owner}, which also has another input')
            self._block_numbers({*inputs, *layer.inputs}, why)

    # What the run has shown, as folds.

    def fold(self, name: str) -> Fold:
        """The layers that a norm is folded into, or why it is kept."""
        fold = Fold(name, type(self._plan.norms[name]).__name__, obstacle=self._plan.obstacles[name])
        parameters = [number for vector in ('weight', 'bias') for number in self._rows.get(f'{name}.{vector}', ())]
        if not fold.obstacle and name not in self._ran:
            fold.obstacle = 'did not run on the example'
        elif not fold.obstacle and (why := self._why(parameters)):
            fold.obstacle = f'its weight or bias {why}, too'
        elif not fold.obstacle:
            joint = None if statistic_of(self._plan.norms[name]) else self._plan.joint_of.get(name)
            self._place(fold, self._channels[name], joint)
        return fold

    def _why(self, numbers: Iterable[int]) -> str:
        """Why one of these numbers is blocked, or ''."""
        return next((consumer.why for number in numbers for consumer in self._consumers.get(number, ())), '')

    def _problem_of(self, layers: Iterable[_Layer], where: str) -> str:
        """Why no norm can be folded into one of these layers, as half a sentence, or ''."""
        for layer in layers:
            why = '' if layer.owner in self._plan.copyable else self._why(layer.weights)
            if problem := layer.problem or (f'has a weight that {why}, too' if why else ''):
                return where.format(layer.owner) + problem
        return ''

    def _place(self, fold: Fold, channels: range, joint: JointFold | None) -> None:
        """Into the layers that consume a norm, or else into those before it."""
        readers = [layer for layer in self._layers.values() if not set(layer.inputs).isdisjoint(channels)]
        consumers = [consumer for number in channels for consumer in self._consumers.get(number, ())]
        allowed = [consumer for consumer in consumers if joint is not None and joint.allows(fold.norm, consumer)]
        padding = {name for number in channels for name in self._padded.get(number, ())}
        can_fill = padding and None not in padding
        obstacles = [consumer for consumer in consumers
                     if consumer not in allowed and not (can_fill and consumer.is_padding)]
        why = next((consumer.why for consumer in sorted(obstacles, key=lambda consumer: consumer.is_padding)), '')
        why = why or self._problem_of(readers, 'is consumed by {}, which ')
        if not why and (readers or allowed):
            fold.joint, fold.pads = joint, [(name, self._plan.fills[name]) for name in sorted(padding)]
            fold.sites = [_site(layer, False, [number - channels.start if number in channels else -1
                                               for number in layer.inputs]) for layer in readers]
            fold.norms_after = list(dict.fromkeys(consumer.norm for consumer in allowed if consumer.norm))
            fold.copied = [layer.owner for layer in readers if layer.owner in self._plan.copyable
                           and self._plan.owners.others(layer.owner, self._plan.modules[layer.owner])]
            return
        fold.obstacle = f"its output {why or 'is consumed by nothing'}"
        if joint is None and not statistic_of(self._plan.norms[fold.norm]):
            self._place_before(fold, len(channels))

    def _place_before(self, fold: Fold, size: int) -> None:
        channels = {number: channel for number, (norm, channel) in self._sources.items() if norm == fold.norm}
        sources = [layer for layer in self._layers.values() if not channels.keys().isdisjoint(layer.outputs)]
        names = ', '.join(layer.owner for layer in sources)
        if fold.norm in self._not_from_layers:
            fold.obstacle += '; its input is not only the output of linear layers'
        elif set(channels.values()) != set(range(size)):
            fold.obstacle += '; the layer before it is consumed by another norm, too'
        elif why := self._why(channels):
            fold.obstacle += f'; the output of {names} before it {why}, too'
        elif problem := self._problem_of(sources, '{} before it '):
            fold.obstacle += f'; {problem}'
        else:
            fold.obstacle = ''
            fold.sites = [_site(layer, True, [channels.get(number, -1) for number in layer.outputs])
                          for layer in sources]


def _calling_function() -> str:
    """The name of the function that calls the module whose forward pass runs this."""
    if is_compiling():  # a compiled norm
        return 'forward'
    frame = inspect.currentframe().f_back.f_back
    while frame.f_back is not None and frame.f_globals.get('__name__') == 'torch.nn.modules.module':
        frame = frame.f_back
    return frame.f_code.co_name


def _site(layer: _Layer, after: bool, channels: list[int]) -> Site:
    return Site(layer.owner, after, layer.weight.rpartition('.')[2], layer.rows, tuple(channels), layer.bias)


def _twin(number: int, is_copied: bool, tensor: Tensor) -> Tensor:
    """A twin of a dyed tensor. The values of another tensor are shifted, so that 0 and 1 are nothing special."""
    if hasattr(tensor, 'dye'):
        return tensor.dye[number].clone() if is_copied else tensor.dye[number]
    return tensor + 0.37 if tensor.is_floating_point() else tensor
