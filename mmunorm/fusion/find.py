"""Step 1 of folding: finds the layers that consume each norm, and the layers before it, by a run on dyed tensors.

The run computes what the model computes. Beside each output of a norm or layer, and each parameter, go its twins of
dye (see `dye`). Linear layers and convolutions read from them which channels they consume; anything else that changes
them is another consumer. The result holds for the code path that the example takes. What Python does not see, such as
the inside of a scripted module, is left to step 3, which compares the outputs.
"""
from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..norms.layers import input_of, is_channels_first
from .affine import has_act
from .check import is_layer
from .dye import MIXED, NOTHING, Dyes, Twins
from .examples import Run, tensors_in
from .plan import FoldPlan, call_obstacle
from .report import Fold, Site

_TRAILING = {F.linear: 0, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}  # dimensions after the channels
_JOINS = frozenset({'cat', 'concat', 'concatenate', 'stack', 'hstack', 'vstack', 'dstack'})
_CASTS = frozenset({'to', 'float', 'double', 'half', 'bfloat16', 'type', 'type_as'})
_EXITS = frozenset({'numpy', '__array__', 'tolist', 'item', '__dlpack__', 'data_ptr', 'storage', 'untyped_storage',
                    '__deepcopy__', '__reduce_ex__'})
_WRITES = re.compile(r'(?!detach_|requires_grad_).*[^_]_|__(i[a-z]+|setitem|set)__')
# Its parts are seen only if it does not ask for modes, such as ours.
_ATTENTION = FunctionType(F.multi_head_attention_forward.__code__,
                          {**vars(F), 'has_torch_function': lambda tensors: False},
                          argdefs=F.multi_head_attention_forward.__defaults__)


@dataclass(eq=False)
class Layer:
    """A linear operator of the run, identified by its weight, or by some rows of a weight."""
    owner: str  # full name of the module that holds the weight
    weight: str  # full name of the weight
    tensor: str  # the first name of the same tensor
    rows: tuple[int, int]  # the rows of the weight that are the operator's, [first, end)
    reads: list[int]  # the number of a norm's channel at each channel of its input, or -1; the same in each call
    bias: list[int] | None  # for each row the number of its bias, in the vectors that the bias consists of
    own: bool  # whether each call was by the owner's own forward
    within: set[str]  # the modules around each call that can fill padding
    problem: str = ''  # why no norm can be folded into it, as half a sentence


@dataclass(eq=False)
class Norm:
    """The calls of a norm."""
    channels: range  # their numbers
    from_layers: bool = True  # whether its inputs are only outputs of layers
    runs: int = 0
    why_not: str = ''


class Obstacle(NamedTuple):
    """Why the norm of a channel cannot be folded into its consumer, as half a sentence after 'its output'."""
    why: str
    is_padding: bool = False  # whether it could be if the padding were not zeros
    inside: str = ''  # the watched module whose forward consumes it


def find(model: nn.Module, plan: FoldPlan, runs: Sequence[Run], dtype: torch.dtype | None = None
         ) -> tuple[list[Fold], list[Run], str]:
    """The fold of each norm of a plan. Runs `model`, a copy of the plan's in `dtype`, which must not be used again.

    Returns the folds, the runs that succeeded, and the last error. Raises a RuntimeError if a required run fails.
    """
    finder, taken, why = _Finder(model, plan), [], ''
    for run in runs:
        try:
            finder.run(run, dtype)
            taken.append(run)
            if run.is_enough:
                break
        except Exception as error:  # what was recorded until then is valid
            why = f'{type(error).__name__}: {error}'
            if run.is_required:
                raise RuntimeError(f'example: the model does not run on it: {why}') from error
    return finder.folds(), taken, why


class _Finder(TorchFunctionMode):

    def __init__(self, model: nn.Module, plan: FoldPlan):
        super().__init__()
        self._model, self._plan = model, plan
        self._layers: dict[tuple[str, int, int, str], Layer] = {}  # by weight, rows and owner
        self._blocked: dict[int, list[Obstacle]] = {}  # channels whose norm cannot fold, and why
        self._padded: dict[int, set[str | None]] = {}  # the modules that pad channels, None for one that cannot fill
        self._readers: dict[int, tuple[str, int]] = {}  # of layers' channels: norm and channel there
        self._norms: dict[str, Norm] = {}
        self._number()
        sums = {station.residual for stream in plan.streams for station in stream.stations}
        for name, module in model.named_modules():
            if name in self._norms:
                module.forward = self._norm_forward(name, module, module.forward)
            elif name in plan.fills or name in sums or (
                    name not in plan.norms and any(True for _ in module.parameters(recurse=False))):
                module.forward = self._module_forward(name, module.forward)
        self._start()

    def _number(self) -> None:
        """Numbers the channels of norms, the outputs of layers, the rows of weights, and the elements of vectors."""
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        weights = [(name, tensor) for name, tensor in tensors if tensor.dim() > 1]
        vectors = [(name, tensor) for name, tensor in tensors if tensor.dim() == 1 and tensor.is_floating_point()]
        size = 0

        def take(count: int) -> range:
            nonlocal size
            size += count
            return range(size - count, size)

        for name, (_, shift) in self._plan.affines.items():
            self._norms[name] = Norm(take(shift.numel()))
        self._end_of_norms = size
        self._outputs = {name: take(len(tensor)) for name, tensor in weights}
        self._end_of_outputs = size
        self._rows = {name: take(len(tensor)) for name, tensor in weights}
        self._vectors = {name: take(len(tensor)) for name, tensor in vectors}
        self._places = {number: (name, i) for name, numbers in self._vectors.items() for i, number in enumerate(numbers)}
        self._dyes = Dyes(size)
        for name, tensor in [*weights, *vectors]:
            tensor.dye = self._dyes.rows((self._rows if tensor.dim() > 1 else self._vectors)[name], tensor)
        self._whole = {id(tensor): name for name, tensor in weights}
        self._aliases: dict[str, dict[str, str]] = {}  # of a shared weight by its first name: all, by their modules
        firsts = {id(tensor): name for name, tensor in self._model.named_parameters()}
        for name, tensor in self._model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(firsts[id(tensor)], {})[name.rpartition('.')[0]] = name

    def _start(self) -> None:
        self._inside: list[str] = []  # the watched modules that are being called
        self._is_suspended = False
        self._dyed: list[weakref.ref[Tensor]] = []

    @torch.no_grad()
    def run(self, run: Run, dtype: torch.dtype | None) -> None:
        """One forward pass. Tensors that are alive after it are in its output or stored by the model."""
        try:
            with self:
                output = run(self._model, dtype)
            known = set(map(id, tensors_in(output)))
            if any(each() is not None and id(each()) not in known for each in self._dyed):
                gc.collect()  # it may be garbage
            for tensor in filter(lambda tensor: tensor is not None, [each() for each in self._dyed]):
                self._block(tensor, 'is an output of the model, or stored by it')
            del output
        finally:
            self._start()

    def _norm_forward(self, name: str, norm: nn.Module, forward: Callable) -> Callable:
        found = self._norms[name]
        has_another_output = has_act(norm) and not isinstance(norm.act, nn.Identity)

        def wrapped(*args, **kwargs):
            if self._is_suspended:  # a part of another norm
                return forward(*args, **kwargs)
            x, _ = input_of(args, kwargs)
            self._is_suspended = True
            try:
                y = forward(*args, **kwargs)
                y = x.view_as(x) if y is x else y  # with a dye of its own
                axis = 1 if has_another_output else None
                with suppress(RuntimeError):  # values are not accessible inside torch.func.vmap
                    axis = axis or _channel_axis(norm, x, y, *self._plan.affines[name])
                if axis is None:
                    found.why_not = 'its output is not its scale times its input plus its shift'
                    self._block(x, f'is consumed by {name}')
                    return y
                self._note_norm(name, x, axis)
                if has_another_output:
                    self._block_numbers(found.channels, Obstacle('goes through its activation'))
                else:
                    self._dye(y, self._dyes.twins(found.channels, y, axis))
            finally:
                self._is_suspended = False
            return y

        return wrapped

    def _module_forward(self, name: str, forward: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            self._inside.append(name)
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside.pop()

        return wrapped

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._is_suspended:
            return func(*args, **kwargs)
        if func in _TRAILING:
            return self._linear(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _ATTENTION(*args, **kwargs)
        dyed = [tensor for tensor in tensors_in((args, kwargs)) if hasattr(tensor, 'dye')]
        output = func(*args, **kwargs)
        if dyed:
            self._follow(func, args, kwargs, dyed, output)
        return output

    def _follow(self, func, args: tuple, kwargs: dict, dyed: list[Tensor], output) -> None:
        """Dyes the outputs of a function that moves or averages elements; else it is a consumer."""
        name, outputs = getattr(func, '__name__', str(func)), list(tensors_in(output))
        if name in _EXITS or _WRITES.fullmatch(name) or kwargs.get('out') is not None:
            twins = None
        elif not outputs:  # a size or a type
            return
        elif name in _CASTS and outputs[0].is_floating_point():  # dye needs its precision
            twins = [args[0].dye] if hasattr(args[0], 'dye') else [None]
        else:
            twins = self._twins(func, args, kwargs, outputs)
        if twins is None:
            for tensor in dyed:
                self._block(tensor, f'is consumed by {name}')
        elif name in _JOINS and args and any(not part.numel() for part in args[0]):
            for tensor in dyed:
                self._block(tensor, 'is concatenated with an empty tensor, which may not be empty at another input size')
        elif name == 'pad':
            self._note_padding(*args, **kwargs)
        for each, dye in zip(outputs, twins or [None] * len(outputs), strict=True):
            if dye is None:
                each.__dict__.pop('dye', None)
            elif not hasattr(each, 'dye'):  # it may be an argument
                self._dye(each, dye)

    def _twins(self, func, args: tuple, kwargs: dict, outputs: list[Tensor]) -> list[Twins | None] | None:
        """The twins of a function's outputs, None for an output that does not depend on dyed tensors' values.

        None instead of the list if it computes something else.
        """
        is_copied = any(hasattr(each, 'dye') for each in outputs)  # an argument, which has perhaps been written to
        try:
            pairs = list(zip(*(tensors_in(func(*_swap(args, i, is_copied), **_swap(kwargs, i, is_copied)))
                              for i in (0, 1)), strict=True))
        except Exception:  # for example a write into an expanded tensor
            return None
        states = [self._dyes.is_moved(pair) if pair[0].shape == each.shape else False
                  for pair, each in zip(pairs, outputs, strict=True)]
        return None if False in states else [pair if state else None for pair, state in zip(pairs, states, strict=True)]

    def _dye(self, tensor: Tensor, twins: Twins) -> None:
        tensor.dye = twins
        self._dyed.append(weakref.ref(tensor))

    def _block(self, tensor: Tensor, why: str, is_padding: bool = False) -> None:
        """Records that something other than a layer consumes a tensor."""
        if (twins := getattr(tensor, 'dye', None)) is not None:
            inside = next(reversed(self._inside), '')
            self._block_numbers(self._dyes.all_in(twins), Obstacle(why, is_padding, inside))

    def _block_numbers(self, numbers: Iterable[int], obstacle: Obstacle) -> None:
        for number in numbers:
            known = self._blocked.setdefault(number, [])
            if obstacle not in known:
                known.append(obstacle)

    def _note_padding(self, input: Tensor, pad: Sequence[int], mode: str = 'constant', value: float | None = None) -> None:
        module = next(filter(self._plan.fills.__contains__, reversed(self._inside)), None)
        if mode == 'constant':
            for number in self._dyes.all_in(input.dye):
                self._padded.setdefault(number, set()).add(module)
        if not any(pad):
            self._block(input, 'is padded by 0 at this input size, and may be padded at another', True)

    def _note_norm(self, name: str, x: Tensor, axis: int) -> None:
        """Records a call of a norm on `x`, whose dimension `axis` is its channels."""
        norm, why = self._norms[name], f'is consumed by the norm {name}'
        norm.runs += 1
        numbers = self._dyes.read(x.dye).movedim(axis, -1).cpu() if hasattr(x, 'dye') else None
        if numbers is None or bool(((numbers < self._end_of_norms) | (numbers >= self._end_of_outputs)).any()):
            norm.from_layers = False
            self._block(x, why)
            return
        size = len(norm.channels)
        for pair in (numbers * size + torch.arange(size)).unique().tolist():
            number, channel = divmod(pair, size)
            if self._readers.setdefault(number, (name, channel)) != (name, channel):
                self._block_numbers([number], Obstacle(f'{why} and by another, or as several channels'))

    def _part(self, weight: Tensor) -> tuple[str, int, int] | None:
        """The name of a weight and its rows, [first, end), or None if it is computed."""
        if name := self._whole.get(id(weight)):
            return name, 0, len(weight)
        if not hasattr(weight, 'dye') or not weight.numel():
            return None
        numbers = self._dyes.read(tuple(twin.flatten(1)[:, [0, -1]] for twin in weight.dye)).cpu()
        first = int(numbers[0, 0])
        name, rows = next(((name, rows) for name, rows in self._rows.items() if first in rows), ('', range(0)))
        is_part = name and torch.equal(numbers, torch.arange(first, first + len(weight))[:, None].expand_as(numbers))
        if not is_part or weight.shape[1:].numel() != self._parameter(name).shape[1:].numel():
            return None
        return name, first - rows.start, first - rows.start + len(weight)

    def _parameter(self, name: str) -> Tensor:
        owner, _, tensor = name.rpartition('.')
        return getattr(self._model.get_submodule(owner), tensor)

    def _linear(self, func, args: tuple, kwargs: dict):
        y = func(*args, **kwargs)
        x, weight, bias = (args[i] if i < len(args) else kwargs.get(name)
                           for i, name in enumerate(('input', 'weight', 'bias')))
        part = self._part(weight)
        if part is None:
            for tensor in tensors_in([x, weight, bias]):
                self._block(tensor, 'is consumed by a layer with a computed weight')
            return y
        owner, axis = part[0].rpartition('.')[0], x.dim() - 1 - _TRAILING[func]
        if self._inside and self._inside[-1] in self._aliases.get(part[0], ()):  # a shared weight
            owner = self._inside[-1]
        reads = [-1] * x.shape[axis]
        if hasattr(x, 'dye') and x.numel():
            numbers = self._dyes.read(x.dye).movedim(axis, -1).reshape(-1, x.shape[axis])
            is_other = numbers >= self._end_of_norms
            self._block_numbers(numbers[is_other].unique().tolist(), Obstacle(f'is consumed by {owner}'))
            numbers[is_other] = NOTHING
            columns = numbers.amax(0)
            if func is not F.linear and _pads(args, kwargs, weight):
                kernel = 'x'.join(map(str, weight.shape[2:]))
                self._block(x, f'is consumed by {owner}, a {kernel} convolution that pads with zeros')
            elif bool((numbers == MIXED).any()):
                self._block(x, f'is consumed by {owner} averaged with other values, such as padding')
            elif not bool(((numbers == columns) | (numbers == NOTHING)).all()):
                self._block(x, f'is consumed by {owner} along another dimension than its channels')
            else:
                if bool((numbers != columns).any()):
                    self._block(x, f'is consumed by {owner} together with other values, such as padding', True)
                reads = columns.tolist()
        self._note_layer(part, owner, reads, bias)
        start = self._outputs[part[0]].start
        self._dye(y, self._dyes.twins(range(start + part[1], start + part[2]), y, axis))
        return y

    def _note_layer(self, part: tuple[str, int, int], owner: str, reads: list[int], bias: Tensor | None) -> None:
        own, problem, numbers = self._inside[-1:] == [owner], '', None
        if bias is not None:
            numbers = self._dyes.read(bias.dye).tolist() if hasattr(bias, 'dye') else []
            if not numbers or any(number not in self._places for number in numbers):
                problem = 'has a bias that is not made of parameters alone'
                self._block(bias, 'is consumed by a bias')
        layer = self._layers.get((*part, owner))
        if layer is None:
            weight = self._aliases.get(part[0], {}).get(owner, part[0])
            within = set(filter(self._plan.fills.__contains__, self._inside))
            layer = self._layers[(*part, owner)] = Layer(owner, weight, part[0], part[1:], reads, numbers, own, within)
        layer.own &= own
        layer.within.intersection_update(self._inside)
        layer.problem = layer.problem or problem or ('has several biases' if numbers != layer.bias else '')
        if reads != layer.reads:
            why = Obstacle(f'is consumed by {owner}, which also has another input')
            self._block_numbers({*reads, *layer.reads} - {-1}, why)

    # What the run has shown, as folds.

    def folds(self) -> list[Fold]:
        """The layers that each norm is folded into, or why it is kept."""
        uses = Counter(number for layer in self._layers.values() for number in layer.bias or ())
        for layer in self._layers.values():
            layer.problem = layer.problem or self._problem(layer, uses)
        return [self._fold(name, uses) for name in self._plan.norms]

    def _fold(self, name: str, uses: Counter) -> Fold:
        fold, norm = Fold(name, type(self._plan.norms[name]).__name__, obstacle=self._plan.obstacles[name]), None
        own = {number for vector in ('weight', 'bias') for number in self._vectors.get(f'{name}.{vector}', ())}
        if fold.obstacle:
            return fold
        norm = self._norms[name]
        if norm.why_not or not norm.runs:
            fold.obstacle = norm.why_not or 'did not run on the example'
        elif why := self._why_blocked(own):
            fold.obstacle = f'its weight or bias {why}, too'
        elif own & uses.keys():
            fold.obstacle = 'its weight or bias is the bias of a layer, too'
        elif name in self._plan.stations:
            self._place_in_stream(fold, norm)
        else:
            self._place(fold, norm)
        return fold

    def _obstacles(self, numbers: Iterable[int]) -> list[Obstacle]:
        return list(dict.fromkeys(obstacle for number in numbers for obstacle in self._blocked.get(number, ())))

    def _why_blocked(self, numbers: Iterable[int]) -> str:
        return next((obstacle.why for obstacle in self._obstacles(numbers)), '')

    def _problem(self, layer: Layer, uses: Counter) -> str:
        """Why no norm can be folded into a layer, as half a sentence, or ''."""
        owner, (first, end) = self._plan.modules[layer.owner], layer.rows
        if layer.owner not in self._plan.untied and (why := self._why_blocked(self._rows[layer.tensor][first:end])):
            return f'has a weight that {why}, too'
        others = (other for other in self._layers.values() if other is not layer)
        if any(other.tensor == layer.tensor and other.rows[0] < end and first < other.rows[1] for other in others):
            return 'has a weight of which another layer uses some rows, too'
        if obstacle := call_obstacle(owner):
            return obstacle
        if layer.bias is not None:
            if why := self._why_blocked(layer.bias):
                return f'has a bias that {why}, too'
            return 'shares its bias' if any(uses[number] > 1 for number in layer.bias) else ''
        is_attention = isinstance(owner, nn.MultiheadAttention) and layer.weight.endswith('in_proj_weight')
        if not layer.own or not (is_layer(owner) or is_attention):
            return f'is called without a bias, and it is not known whether {type(owner).__name__} would use one'
        return ''

    def _into(self, fold: Fold, norm: Norm, readers: list[Layer]) -> None:
        fold.sites = [self._site(layer, False, [number - norm.channels.start if number in norm.channels else -1
                                                for number in layer.reads]) for layer in readers]
        fold.untied = [layer.owner for layer in readers if layer.owner in self._plan.untied
                       and self._plan.owners.others(layer.owner, self._plan.modules[layer.owner])]

    def _site(self, layer: Layer, after: bool, channels: list[int]) -> Site:
        bias = tuple(self._places[number] for number in layer.bias or ())
        return Site(layer.owner, after, layer.weight.rpartition('.')[2], layer.rows, tuple(channels), bias)

    def _consumers(self, norm: Norm) -> tuple[list[Layer], set[str | None], str]:
        """The layers that consume a norm, the modules that pad it, and why one of the layers cannot take it, or ''."""
        readers = [layer for layer in self._layers.values() if any(number in norm.channels for number in layer.reads)]
        padding = {name for number in norm.channels for name in self._padded.get(number, ())}
        problem = next((f'is consumed by {layer.owner}, which {layer.problem}' for layer in readers if layer.problem), '')
        return readers, padding, problem

    def _place(self, fold: Fold, norm: Norm) -> None:
        readers, padding, problem = self._consumers(norm)
        obstacles = sorted(self._obstacles(norm.channels), key=lambda each: each.is_padding)
        why = obstacles[0].why if obstacles else ''
        if why and obstacles[0].is_padding and len(padding) == 1 and None not in padding and all(
                padding <= layer.within for layer in readers):
            fold.pads, why = [(name, self._plan.fills[name]) for name in padding], ''
        why = why or problem
        if readers and not why:
            return self._into(fold, norm, readers)
        fold.pads = []
        why = f"its output {why or 'is consumed by nothing'}; "
        read = {number: channel for number, (reader, channel) in self._readers.items() if reader == fold.norm}
        sources = {layer: self._outputs[layer.tensor][slice(*layer.rows)] for layer in self._layers.values()}
        sources = {layer: numbers for layer, numbers in sources.items() if not read.keys().isdisjoint(numbers)}
        if not norm.from_layers:
            fold.obstacle = f'{why}its input is not only the output of linear layers'
        elif set(read.values()) != set(range(len(norm.channels))):
            fold.obstacle = f'{why}the layer before it is consumed by another norm, too'
        elif why_not := self._why_blocked(read):
            names = ', '.join(layer.owner for layer in sources)
            fold.obstacle = f'{why}the output of {names} before it {why_not}, too'
        elif problem := next((f'{layer.owner} before it {layer.problem}' for layer in sources if layer.problem), ''):
            fold.obstacle = why + problem
        else:
            fold.sites = [self._site(layer, True, [read.get(number, -1) for number in numbers])
                          for layer, numbers in sources.items()]

    def _place_in_stream(self, fold: Fold, norm: Norm) -> None:
        """Places a norm that is consumed by the next sum and the next sublayer, or by the end of the stream."""
        (stream, reader), (readers, padding, problem) = self._plan.stations[fold.norm], self._consumers(norm)
        others = [layer.owner for layer in readers if reader and not f'{layer.owner}.'.startswith(f'{reader.part}.')]
        why = f'is consumed by {others[0]}, which is not the next sublayer' if others else ''
        # The next sum is also a consumer. At the end, norms are; one may follow an unfold.
        ends = [] if reader else ['is consumed by unfold', *(f'is consumed by the norm {end}' for end in stream.ends)]
        why = why or next((each.why for each in self._obstacles(norm.channels) if not each.is_padding
                           and not (reader and each.inside == reader.residual) and each.why not in ends), '')
        if not why and None in padding:
            why = 'is padded with zeros that cannot be filled'
        if why := why or problem:
            fold.obstacle = f'its output {why}'
        elif not readers and not (stream.ends and reader is None):
            fold.obstacle = 'its output is consumed by nothing in this model'
        else:
            fold.stream = stream
            fold.pads = [(name, self._plan.fills[name]) for name in sorted(padding)]
            self._into(fold, norm, readers)


def _swap(value, twin: int, is_copied: bool):
    """An argument with the twins of dyed tensors. Other values are shifted, so that 0 and 1 are nothing special."""
    if isinstance(value, Tensor):
        if hasattr(value, 'dye'):
            return value.dye[twin].clone() if is_copied else value.dye[twin]
        return value + 0.37 if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _swap(each, twin, is_copied) for key, each in value.items()}
    return type(value)(_swap(each, twin, is_copied) for each in value) if type(value) in (tuple, list) else value


def _pads(args: tuple, kwargs: dict, weight: Tensor) -> bool:
    """Whether a convolution pads with zeros. Padding modes such as reflection are separate operators."""
    padding = args[4] if len(args) > 4 else kwargs.get('padding', 0)
    if isinstance(padding, str):
        return padding == 'same' and max(weight.shape[2:]) > 1
    return any(padding) if isinstance(padding, (tuple, list)) else bool(padding)


def _channel_axis(norm: nn.Module, x: Tensor, y: Tensor, scale: Tensor, shift: Tensor) -> int | None:
    """The dimension of `x` over which `y = scale * x + shift`, found from the values; None if there is none."""
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    tolerance = min(64 * torch.finfo(y.dtype).eps, 0.02)
    matrix = scale if scale.dim() > 1 else None
    for axis in dict.fromkeys((1 if is_channels_first(norm) else x.dim() - 1, x.dim() - 1, 1)):
        if axis < x.dim() and x.shape[axis] == len(scale):
            values, result = x.double().movedim(axis, -1), y.double().movedim(axis, -1)
            product = values * scale if matrix is None else values @ matrix.mT
            size = values.abs() * scale.abs() if matrix is None else values.abs() @ matrix.abs().mT
            if not x.numel() or (result - product - shift).abs().amax() <= tolerance * (size + shift.abs()).amax():
                return axis
    return None
