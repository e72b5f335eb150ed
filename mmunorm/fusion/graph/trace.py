"""Runs a model on an example and records who reads the output of each norm and layer.

Every operator is seen, at the level of ATen, in torch's inference mode, where linear layers and convolutions arrive
whole. What the trace proves holds for the way that the example takes through the model.
"""
from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...norms.layers import input_of, is_channels_first, is_norm
from ..check import norm_obstacle
from ..rewrite import affine_of, has_act
from .labels import NOTHING, SHAPE_ONLY, Labels, Unclear, by_channel, carry, tensors_in
from .record import Call, Layer, Record

_LINEAR = 'linear'
_CONVS = {'conv1d': 1, 'conv2d': 2, 'conv3d': 3}
_CUTS = frozenset({'chunk', 'narrow', 'slice', 'split', 'split_with_sizes'})
_HARMLESS = frozenset({'detach_'})
_EXITS = frozenset({'numpy', '__array__', 'tolist', '__dlpack__', 'data_ptr', 'storage', 'untyped_storage'})
OUTPUT = 'is an output of the model, or kept by it'


def trace(model: nn.Module, example) -> Record:
    """Runs a copy of `model` on an example, and where that is a tensor of pictures or tokens on other sizes it takes.

    To be called in inference mode.

    Args:
        model (nn.Module): in eval mode; unchanged.
        example: what goes into it: a tensor, a tuple of arguments, a dict of keyword arguments, or a list of such,
            of which each is run.

    Raises:
        TypeError: `example` is none of these.
        RuntimeError: the model does not run on it.
    """
    examples = example if isinstance(example, list) else [example]
    for one in examples:
        if not isinstance(one, (Tensor, tuple, dict)):
            raise TypeError('example: must be a tensor, a tuple of arguments, a dict of keyword arguments, or a list '
                            f'of such, got {type(one).__name__}')
    if not examples:
        raise TypeError('example: the list is empty')
    tracer = _Tracer(copy.deepcopy(model))
    for one in examples:
        try:
            tracer.run(one)
        except Exception as error:
            raise RuntimeError(f'example: the model does not run on it: {type(error).__name__}: {error}') from error
        for other in _other_sizes(one):
            tracer.run(other, may_fail=True)
    return tracer.record


def _other_sizes(example) -> Iterator[Tensor]:
    """Pictures and sequences of other sizes: what pads by nothing at one size may pad at another."""
    if not isinstance(example, Tensor) or not example.is_floating_point() or not example.numel():
        return
    if example.dim() == 4:
        height, width = example.shape[2:]
        for size in ((height + 5, width + 3), (height + 32, width + 64)):
            yield F.interpolate(example, size, mode='nearest')
    elif example.dim() == 3:
        length = example.shape[1]
        for other in (1, length + 1, 2 * length + 3):
            yield example[:, torch.arange(other, device=example.device) % length]


class _Tracer(TorchDispatchMode):

    def __init__(self, model: nn.Module):
        super().__init__()
        self.record = Record()
        self._model = model
        self._labels: dict[int, tuple[Tensor, Labels]] = {}
        # Kept, so that no other tensor gets an id of theirs.
        self._tensors = [*model.named_parameters(), *model.named_buffers()]
        self._names = {id(tensor): name for name, tensor in self._tensors}
        self._vectors: dict[str, Labels] = {}
        self._parts: dict[int, tuple[Tensor, str, int, int]] = {}  # rows of weights: weight, first row and end
        self._inside: list[str] = []  # the modules that are being called, of those that are watched
        self._suspended = 0
        self._clock = 0
        self._written: dict[int, int] = {}  # when a storage was last written to
        self._norm_inputs: dict[str, list[tuple[Tensor, int]]] = {}
        for name, module in model.named_modules():
            if is_norm(module):
                if not norm_obstacle(module, allow_act=True):
                    self.record.norms[name] = Call(self.record.add(name, 'norm', affine_of(module)[1].numel()))
                    module.forward = self._norm_forward(name, module, module.forward)
            elif any(True for _ in module.parameters(recurse=False)):
                module.forward = self._module_forward(name, module.forward)

    def run(self, example, may_fail: bool = False) -> None:
        """One forward pass; one that `may_fail` and does leaves what has been seen until then."""
        try:
            with self, _Exits(self):
                if isinstance(example, Tensor):
                    output = self._model(example)
                elif isinstance(example, tuple):
                    output = self._model(*example)
                else:
                    output = self._model(**example)
            self._block_what_is_left()
            del output
        except Exception:
            if not may_fail:
                raise
        finally:
            self._labels.clear()
            self._written.clear()
            self._norm_inputs.clear()
            self._vectors.clear()
            self._parts.clear()
            self._inside.clear()
            self._suspended = 0

    def _block_what_is_left(self) -> None:
        """What still lives behind the forward pass is in its output, or the model has kept it."""
        left = [(weakref.ref(tensor), labels) for tensor, labels in self._labels.values()
                if id(tensor) not in self._names]
        self._labels.clear()
        self._norm_inputs.clear()
        gc.collect()
        for tensor, labels in left:
            if tensor() is not None:
                self.record.block(labels, OUTPUT)

    def _norm_forward(self, name: str, norm: nn.Module, forward: Callable) -> Callable:
        call = self.record.norms[name]
        scale, shift = affine_of(norm)
        has_another_output = has_act(norm) and not isinstance(norm.act, nn.Identity)

        def wrapped(*args, **kwargs):
            if self._suspended:  # a part of another norm
                return forward(*args, **kwargs)
            x, _ = input_of(args, kwargs)
            mixes = scale.dim() > 1
            with self._suspend():
                y = forward(*args, **kwargs)
                axis = None if mixes else 1 if has_another_output else _channel_axis(norm, x, y, scale, shift)
            labels = self._of(x)
            if axis is None:
                call.why_not = 'it mixes channels, which only rules fold' if mixes else (
                    'its output is not its scale times its input plus its shift')
                self._block(labels, f'is read by {name}')
                return y
            self.record.note_norm(call, labels, axis)
            self._norm_inputs.setdefault(name, []).append((x, self._clock))
            numbers = _numbers(call.origin.start, y, axis)
            if has_another_output:
                self._block(numbers, 'goes through its activation')
            else:
                self._set(y, numbers)
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

    @contextmanager
    def _suspend(self) -> Iterator[None]:
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def _of(self, tensor) -> Labels | None:
        """The labels of a tensor; of a vector among the parameters and buffers, its own numbers."""
        if id(tensor) in self._labels:
            return self._labels[id(tensor)][1]
        name = self._names.get(id(tensor))
        if name is None or tensor.dim() != 1 or not tensor.is_floating_point():
            return None
        if name not in self._vectors:
            known = next((origin for origin in self.record.origins if origin.kind == 'vector' and origin.name == name),
                         None)
            origin = known or self.record.add(name, 'vector', len(tensor))
            self._vectors[name] = torch.arange(origin.start, origin.start + origin.size, device=tensor.device)
        return self._vectors[name]

    def _set(self, tensor: Tensor, labels: Labels) -> None:
        self._labels[id(tensor)] = tensor, labels

    def _block(self, labels: Labels | None, why: str) -> None:
        if labels is not None:
            self.record.block(labels, why)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._suspended:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._operator(func, args, kwargs or {})

    def leaves_torch(self, tensor, name: str) -> None:
        """Notes that the values of a tensor go where no operator is seen any more."""
        if not self._suspended:
            self._block(self._of(tensor), f'is read by {name}')

    def _operator(self, func, args: tuple, kwargs: dict):
        name = func._schema.name.removeprefix('aten::')
        if name == _LINEAR or name in _CONVS:
            return self._linear(name, func, args, kwargs)
        tensors = [arg for arg in tensors_in((args, kwargs)) if self._is_known(arg)]
        if name in SHAPE_ONLY or not tensors:
            self._note_writes(func, args, kwargs)
            return func(*args, **kwargs)
        if name in _CUTS and self._part_of(args[0]) is not None:
            outputs = func(*args, **kwargs)
            if self._cut(func, args, kwargs, outputs):
                return outputs
        reads = why = f'is read by {name}'
        labelled = [tensor for tensor in tensors if self._of(tensor) is not None]
        changes, outputs = func._schema.is_mutable, None
        if labelled and not changes:
            outputs = func(*args, **kwargs)
            try:
                if self._carried(name, func, args, kwargs, outputs):
                    self._note_matrices(tensors, reads)
                    return outputs
            except Unclear as unclear:
                why = str(unclear)
        if why == reads and not changes:  # perhaps it consists of others that are known
            with self, _Exits(self):
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        for tensor in labelled if name not in _HARMLESS else ():
            self._block(self._of(tensor), why)
        self._note_matrices(tensors, why)
        self._note_writes(func, args, kwargs)
        return func(*args, **kwargs) if outputs is None else outputs

    def _part_of(self, tensor: Tensor) -> tuple[str, int, int] | None:
        """The name of a weight that a tensor is, or is some rows of, with these rows."""
        if id(tensor) in self._parts:
            return self._parts[id(tensor)][1:]
        name = self._names.get(id(tensor))
        return None if name is None or tensor.dim() < 2 else (name, 0, len(tensor))

    def _cut(self, func, args: tuple, kwargs: dict, outputs) -> bool:
        """Notes which rows of a weight the outputs are; whether they are rows."""
        weight = args[0]
        if not weight.numel():
            return False
        name, first, _ = self._part_of(weight)
        numbers = torch.arange(weight.numel()).view(weight.shape)
        parts = func(numbers, *args[1:], **kwargs)
        pairs = [(outputs, parts)] if isinstance(outputs, Tensor) else list(zip(outputs, parts, strict=True))
        width = weight[0].numel()
        found = []
        for output, part in pairs:
            start = int(part.flatten()[0]) // width if part.numel() else 0
            if not torch.equal(part, numbers[start:start + len(part)]):
                return False
            found.append((output, name, first + start, first + start + len(part)))
        self._parts.update((id(part[0]), part) for part in found)
        return True

    def _carried(self, name: str, func, args: tuple, kwargs: dict, outputs) -> bool:
        """Labels the outputs of an operator that moves or averages; whether it is one."""
        flat = [outputs] if isinstance(outputs, Tensor) else outputs
        if not isinstance(flat, (tuple, list)) or not all(isinstance(output, Tensor) for output in flat):
            return False
        try:
            labels = carry(name, func, args, kwargs, list(flat), self._of)
        except RuntimeError:  # it is not made for whole numbers
            return False
        for output, each in zip(flat, labels or (), strict=labels is not None):
            self._set(output, each)
        return labels is not None

    def _note_matrices(self, tensors: list[Tensor], why: str) -> None:
        for tensor in tensors:
            if id(tensor) in self._parts:
                self.record.foreign.setdefault(self._parts[id(tensor)][1], why)
            elif id(tensor) in self._names and tensor.dim() != 1:
                self.record.foreign.setdefault(self._names[id(tensor)], why)

    def _is_known(self, tensor: Tensor) -> bool:
        return any(id(tensor) in known for known in (self._labels, self._names, self._parts))

    def _note_writes(self, func, args: tuple, kwargs: dict) -> None:
        if not func._schema.is_mutable:
            return
        self._clock += 1
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_in(args[i] if i < len(args) else kwargs.get(argument.name)):
                    self._written[tensor.untyped_storage()._cdata] = self._clock

    def _linear(self, name: str, func, args: tuple, kwargs: dict):
        x, weight, bias, *_ = *args, None
        y = func(*args, **kwargs)
        self._inputs_unchanged(x)
        labels, part = self._of(x), self._part_of(weight)
        if part is None:
            why = 'is read by a layer whose weight is computed'
            for tensor in (x, weight, bias):
                if isinstance(tensor, Tensor):
                    self._block(self._of(tensor), why)
            self._note_matrices([tensor for tensor in (x, bias) if isinstance(tensor, Tensor)], why)
            return y
        if id(x) in self._names or id(x) in self._parts:
            self._block(labels, f'is read by {name}')
            self._note_matrices([x], f'is read by {name}')
            labels = None
        axis = x.dim() - 1 if name == _LINEAR else x.dim() - 1 - _CONVS[name]
        layer_name = part[0].rpartition('.')[0]
        columns = None if labels is None else by_channel(labels, axis)
        pads = name != _LINEAR and _pads(args, kwargs, weight)
        if pads:
            kernel = 'x'.join(map(str, weight.shape[2:]))
            self._block(labels, f'is read by {layer_name}, a {kernel} convolution that pads with zeros')
            columns = None
        elif labels is not None and columns is None:
            how = ('together with other values, such as padding' if bool((labels == NOTHING).any())
                   else 'along another dimension than its channels')
            self._block(labels, f'is read by {layer_name} {how}')
        if columns is None:
            columns = torch.full((x.shape[axis], ), NOTHING)
        self._note_layer(part, layer_name, columns.cpu(), bias)
        rows = self.record.layers[part].rows
        self._set(y, _numbers(rows.start, y, axis if name != _LINEAR else y.dim() - 1))
        return y

    def _note_layer(self, part: tuple[str, int, int], owner: str, columns: Labels, bias: Tensor | None) -> None:
        own = bool(self._inside) and self._inside[-1] == owner
        problem, numbers = '', None
        if bias is not None:
            numbers = self._of(bias)
            if numbers is None or not self._are_vectors(numbers):
                problem = 'has a bias that is not made of parameters alone'
                self._note_matrices([bias], 'is read by a bias')
            numbers = None if numbers is None else numbers.cpu()
        layer = self.record.layers.get(part)
        if layer is None:
            weight, first, end = part
            rows = self.record.add(weight, 'layer', end - first)
            self.record.layers[part] = Layer(weight, first, owner, rows, columns, numbers, own, problem)
            return
        layer.own &= own
        layer.problem = layer.problem or problem
        if (numbers is None) != (layer.bias is None) or numbers is not None and not torch.equal(numbers, layer.bias):
            layer.problem = layer.problem or 'has several biases'
        if not torch.equal(columns, layer.columns):
            self._block(torch.cat([columns, layer.columns]), f'is read by {owner}, which reads something else, too')

    def _are_vectors(self, numbers: Labels) -> bool:
        return bool((numbers >= 0).all()) and all(
            origin.kind == 'vector' for origin in self.record.origins_of(numbers.cpu()))

    def _inputs_unchanged(self, x: Tensor) -> None:
        """Blocks a norm whose input has been written to before its output is read: without it, they are one."""
        labels = self._of(x)
        if labels is None or not self._written:
            return
        for origin in self.record.origins_of(self.record.numbers(labels)):
            for tensor, when in self._norm_inputs.get(origin.name, ()) if origin.kind == 'norm' else ():
                if self._written.get(tensor.untyped_storage()._cdata, -1) > when:
                    self._block(labels, 'is read after its input has been changed in place')


class _Exits(TorchFunctionMode):
    """Sees where values leave torch, which no operator tells.

    While it is there, torch's own Transformer layers take the ordinary path: the fast one is one operator, which
    hides their projections.
    """

    def __init__(self, tracer: _Tracer):
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, '__name__', '')
        if name in _EXITS and args:
            self._tracer.leaves_torch(args[0], name)
        return func(*args, **(kwargs or {}))


def _numbers(start: int, tensor: Tensor, axis: int) -> Labels:
    shape = [1] * tensor.dim()
    shape[axis] = -1
    size = tensor.shape[axis]
    return torch.arange(start, start + size, device=tensor.device).view(shape).expand(tensor.shape)


def _pads(args: tuple, kwargs: dict, weight: Tensor) -> bool:
    """Whether a convolution pads; what its module pads before, such as reflections, is another operator."""
    padding = args[4] if len(args) > 4 else kwargs.get('padding', 0)
    if isinstance(padding, str):
        return padding == 'same' and max(weight.shape[2:]) > 1
    return any(padding) if isinstance(padding, (tuple, list)) else bool(padding)


def _channel_axis(norm: nn.Module, x: Tensor, y: Tensor, scale: Tensor, shift: Tensor) -> int | None:
    """The dimension of `x` over which `y = scale * x + shift`, by its values; None if there is none."""
    if not isinstance(y, Tensor) or y is x or y.shape != x.shape or y.numel() and y.data_ptr() == x.data_ptr():
        return None
    tolerance = min(64 * torch.finfo(y.dtype).eps, 0.02)
    for axis in dict.fromkeys((1 if is_channels_first(norm) else x.dim() - 1, x.dim() - 1, 1)):
        if axis < x.dim() and x.shape[axis] == len(scale):
            shape = [1] * x.dim()
            shape[axis] = -1
            size = (scale.abs().view(shape) * x.double().abs() + shift.abs().view(shape)).amax()
            error = (y.double() - scale.view(shape) * x.double() - shift.view(shape)).abs().amax()
            if error <= tolerance * size:
                return axis
    return None
