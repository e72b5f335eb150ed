"""Traces a model on an example and records the consumers of each norm and layer.

The trace sees all ATen operators. It runs in torch's inference mode, where linear layers and convolutions are single
operators. Its result holds for the code path that the example takes.
"""
from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ...norms.layers import input_of, is_channels_first
from ..affine import has_act, standardized_input
from ..examples import Run
from ..plan import FoldPlan
from .labels import NOTHING, SHAPE_ONLY, Labels, Unclear, by_channel, carry, tensors_in
from .traced import TracedLayer, TracedModel, TracedNorm

_TRAILING = {'linear': 0, 'conv1d': 1, 'conv2d': 2, 'conv3d': 3}  # dimensions after the channels
_CUTS = frozenset({'slice', 'split', 'split_with_sizes'})
_EXITS = frozenset({'numpy', '__array__', 'tolist', '__dlpack__', 'data_ptr', 'storage', 'untyped_storage',
                    '__deepcopy__', '__reduce_ex__'})


@torch.inference_mode()
def trace(model: nn.Module, plan: FoldPlan, runs: Sequence[Run], dtype: torch.dtype | None = None
          ) -> tuple[TracedModel, list[Run], str]:
    """Traces a model, a copy of the plan's in `dtype`. Returns the trace, the runs that succeeded, and the last error.

    Raises a RuntimeError if a required run fails.
    """
    tracer, taken, why = _Tracer(model, plan), [], ''
    for run in runs:
        try:
            tracer.run(run, dtype)
            taken.append(run)
            if run.is_enough:
                break
        except Exception as error:  # what was recorded until then is valid
            why = f'{type(error).__name__}: {error}'
            if run.is_required:
                raise RuntimeError(f'example: the model does not run on it: {why}') from error
    return tracer.traced, taken, why


class _Tracer(TorchDispatchMode):

    def __init__(self, model: nn.Module, plan: FoldPlan):
        super().__init__()
        self.traced = TracedModel()
        self._model = model
        self._fills = plan.fills
        sums = {station.residual for stream in plan.streams for station in stream.stations}
        firsts = {id(tensor): name for name, tensor in model.named_parameters()}
        self._aliases: dict[str, dict[str, str]] = {}  # of a shared weight by its first name: all, by their modules
        for name, tensor in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(firsts[id(tensor)], {})[name.rpartition('.')[0]] = name
        self._vectors = WeakTensorKeyDictionary()  # the numbers of each vector of the model
        self._weights = WeakTensorKeyDictionary()  # the name and the rows of each weight
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() > 1:
                self._weights[tensor] = name, 0, len(tensor)
            elif tensor.dim() == 1 and tensor.is_floating_point():
                numbers = self.traced.add(name, 'vector', len(tensor)).channels
                self._vectors[tensor] = torch.tensor(numbers, dtype=torch.long, device=tensor.device)
        for name, module in model.named_modules():
            if name in plan.affines:
                scale, shift = plan.affines[name]
                self.traced.norms[name] = TracedNorm(self.traced.add(name, 'norm', shift.numel()))
                module.forward = self._norm_forward(name, module, module.forward, scale, shift)
            elif name in plan.fills or name in sums or (
                    name not in plan.norms and any(True for _ in module.parameters(recurse=False))):
                module.forward = self._module_forward(name, module.forward)
        self._start()

    def _start(self) -> None:
        self._labels = WeakTensorKeyDictionary(self._vectors)
        self._parts = WeakTensorKeyDictionary(self._weights)
        self._inside: list[str] = []  # the watched modules that are being called
        self._is_suspended = False
        self._norm_inputs: dict[int, tuple[Tensor, set[str]]] = {}  # by storage, with the norms of that input
        self._changed: set[str] = set()  # norms whose input has been written to since

    def run(self, run: Run, dtype: torch.dtype | None) -> None:
        """One forward pass. Tensors that are alive after it are in its output or stored by the model."""
        if is_ours := not gc.get_freeze_count():
            gc.freeze()  # the collection then inspects only what the pass created
        try:
            with self, _Exits(self):
                output = run(self._model, dtype)
            self._norm_inputs.clear()
            gc.collect()
            for tensor, labels in list(self._labels.items()):
                if tensor not in self._vectors:
                    self.traced.block(labels, 'is an output of the model, or stored by it')
            del output
        finally:
            if is_ours:
                gc.unfreeze()
            self._start()

    def _norm_forward(self, name: str, norm: nn.Module, forward: Callable, scale: Tensor, shift: Tensor) -> Callable:
        call = self.traced.norms[name]
        has_another_output = has_act(norm) and not isinstance(norm.act, nn.Identity)

        def wrapped(*args, **kwargs):
            if self._is_suspended:  # a part of another norm
                return forward(*args, **kwargs)
            x, _ = input_of(args, kwargs)
            self._is_suspended = True
            try:
                y = forward(*args, **kwargs)
                y = x.view_as(x) if y is x else y  # with labels of its own
                axis = 1 if has_another_output else None
                with suppress(RuntimeError):  # values are not accessible inside torch.func.vmap
                    axis = axis or _channel_axis(norm, x, y, scale, shift)
                self._norm_inputs.setdefault(x.untyped_storage()._cdata, (x, set()))[1].add(name)
            finally:
                self._is_suspended = False
            if axis is None:
                call.why_not = 'its output is not its scale times its input plus its shift'
                self.traced.block(self._labels.get(x), f'is consumed by {name}')
                return y
            self.traced.note_norm(call, self._labels.get(x), axis)
            labels = _numbers(call.gives.channels, y, axis)
            if has_another_output:
                self.traced.block(labels, 'goes through its activation')
            else:
                self._labels[y] = labels
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

    def note_read(self, tensor: Tensor, why: str) -> None:
        """Records that something other than a layer consumes a tensor: its channels, or the weight that it is."""
        if self._is_suspended:
            return
        self.traced.block(self._labels.get(tensor), why, inside=next(reversed(self._inside), ''))
        if tensor in self._parts:
            self.traced.foreign.setdefault(self._parts[tensor][0], why)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._is_suspended:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._operator(func, args, kwargs or {})

    def _operator(self, func, args: tuple, kwargs: dict):
        name = func._schema.name.removeprefix('aten::')
        if name in _TRAILING:
            return self._linear(name, func, args, kwargs)
        outputs = func(*args, **kwargs)
        self._note_writes(func, args, kwargs)
        tensors = [arg for arg in tensors_in((args, kwargs)) if arg in self._labels or arg in self._parts]
        if name in SHAPE_ONLY or not tensors:
            return outputs
        if name in _CUTS and args[0] in self._parts and self._cut(func, args, kwargs, outputs):
            return outputs
        why = f'is consumed by {name}'
        if not func._schema.is_mutable:
            try:
                if self._carried(name, func, args, kwargs, outputs):
                    tensors = [tensor for tensor in tensors if tensor in self._parts]
                else:  # it may be composed of known operators
                    with self, _Exits(self):
                        parts = func.decompose(*args, **kwargs)
                    if parts is not NotImplemented:
                        return parts
            except Unclear as unclear:
                why = str(unclear)
        for tensor in tensors if name != 'detach_' else ():
            self.note_read(tensor, why)
        return outputs

    def _cut(self, func, args: tuple, kwargs: dict, outputs) -> bool:
        """Records which rows of a weight the outputs are. Returns whether they are rows."""
        name, first, _ = self._parts[args[0]]
        numbers = torch.arange(args[0].numel()).view(args[0].shape)
        found, width = [], max(numbers[:1].numel(), 1)
        for part in _listed(func(numbers, *args[1:], **kwargs)):
            start = int(part.flatten()[0]) // width if part.numel() else 0
            if not torch.equal(part, numbers[start:start + len(part)]):
                return False
            found.append((name, first + start, first + start + len(part)))
        for output, rows in zip(_listed(outputs), found, strict=True):
            self._parts[output] = rows
        return True

    def _carried(self, name: str, func, args: tuple, kwargs: dict, outputs) -> bool:
        """Labels the outputs of an operator that moves or averages elements. Returns whether it is one."""
        if not all(isinstance(output, Tensor) for output in _listed(outputs)):
            return False
        try:
            labels = carry(name, func, args, kwargs, _listed(outputs), self._labels.get)
        except RuntimeError:  # not implemented for integers
            return False
        if name in ('pad', 'constant_pad_nd') and labels:
            self._note_padding(args, self._labels.get(args[0]))
        for output, each in zip(_listed(outputs), labels or (), strict=labels is not None):
            self._labels[output] = each
        return labels is not None

    def _note_padding(self, args: tuple, labels: Labels) -> None:
        self.traced.note_padding(labels, next(filter(self._fills.__contains__, reversed(self._inside)), None))
        if not any(args[1]):
            self.traced.block(labels, 'is padded by 0 at this input size, and may be padded at another', True)

    def _note_writes(self, func, args: tuple, kwargs: dict) -> None:
        for i, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_in(args[i] if i < len(args) else kwargs.get(argument.name)):
                    self._changed |= self._norm_inputs.get(tensor.untyped_storage()._cdata, (None, set()))[1]

    def _linear(self, name: str, func, args: tuple, kwargs: dict):
        x, weight, bias, *_ = *args, None
        y = func(*args, **kwargs)
        self._block_changed(x)
        labels, part = self._labels.get(x), self._parts.get(weight)
        if part is None:
            for tensor in tensors_in([x, weight, bias]):
                self.note_read(tensor, 'is consumed by a layer with a computed weight')
            return y
        if x in self._vectors or x in self._parts:
            self.note_read(x, f'is consumed by {name}')
            labels = None
        axis = x.dim() - 1 - _TRAILING[name]
        owner = part[0].rpartition('.')[0]
        if self._inside and self._inside[-1] in self._aliases.get(part[0], ()):  # a shared weight
            owner = self._inside[-1]
        columns = None if labels is None else by_channel(labels, axis)
        if name != 'linear' and _pads(args, kwargs, weight):
            kernel = 'x'.join(map(str, weight.shape[2:]))
            self.traced.block(labels, f'is consumed by {owner}, a {kernel} convolution that pads with zeros')
            columns = None
        elif labels is not None and (columns is None or bool((labels.movedim(axis, -1) != columns).any())):
            how = ('together with other values, such as padding' if bool((labels == NOTHING).any()) else
                   'along another dimension than its channels')
            self.traced.block(labels, f'is consumed by {owner} {how}', is_padding=columns is not None)
        layer = self._note_layer(part, owner, [NOTHING] * x.shape[axis] if columns is None else columns.tolist(), bias)
        self._labels[y] = _numbers(layer.gives.channels, y, axis if name != 'linear' else y.dim() - 1)
        return y

    def _note_layer(self, part: tuple[str, int, int], owner: str, reads: list[int], bias: Tensor | None) -> TracedLayer:
        own, problem, numbers = self._inside[-1:] == [owner], '', None
        if bias is not None:
            labels = self._labels.get(bias)
            numbers = [] if labels is None else labels.tolist()
            if not numbers or any(n < 0 or self.traced.origin_of(n).kind != 'vector' for n in numbers):
                problem = 'has a bias that is not made of parameters alone'
                self.note_read(bias, 'is consumed by a bias')
        part = (*part, owner)
        layer = self.traced.layers.get(part)
        if layer is None:
            tensor, *rows = part[:3]
            weight = self._aliases.get(tensor, {}).get(owner, tensor)
            gives = self.traced.add(weight, 'layer', rows[1] - rows[0])
            within = set(filter(self._fills.__contains__, self._inside))
            layer = TracedLayer(owner, weight, tensor, tuple(rows), gives, reads, numbers, own, within, problem)
            self.traced.layers[part] = layer
        layer.own &= own
        layer.within.intersection_update(self._inside)
        layer.problem = layer.problem or problem or ('has several biases' if numbers != layer.bias else '')
        if reads != layer.reads:
            why = f'is consumed by {owner}, which also has another input'
            self.traced.block(torch.tensor(reads + layer.reads), why)
        return layer

    def _block_changed(self, x: Tensor) -> None:
        """Blocks a norm whose input is written to before its output is used: once folded, both are one tensor."""
        labels = self._labels.get(x)
        if self._changed and labels is not None:
            names = {self.traced.origin_of(number).name for number in self.traced.numbers(labels)}
            if names & self._changed:
                self.traced.block(labels, 'is consumed after its input has been changed in place')


class _Exits(TorchFunctionMode):
    """Records where values leave torch, and disables the fused path of torch's Transformer layers."""

    def __init__(self, tracer: _Tracer):
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, '__name__', '')
        if name in _EXITS and args:
            self._tracer.note_read(args[0], f'is consumed by {name}')
        return func(*args, **(kwargs or {}))


def _listed(value) -> list:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _numbers(channels: range, tensor: Tensor, axis: int) -> Labels:
    shape = [1] * tensor.dim()
    shape[axis] = -1
    return torch.arange(channels.start, channels.stop, device=tensor.device).view(shape).expand(tensor.shape)


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
            values, result = (value.double().movedim(axis, -1) for value in (standardized_input(norm, x, axis), y))
            product = values * scale if matrix is None else values @ matrix.mT
            size = values.abs() * scale.abs() if matrix is None else values.abs() @ matrix.abs().mT
            if not x.numel() or (result - product - shift).abs().amax() <= tolerance * (size + shift.abs()).amax():
                return axis
    return None
