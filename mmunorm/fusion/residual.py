"""Finds residual streams: the layers and parameters that write the input of each norm, by gradients of one run.

Each candidate for a writer, the output of a linear layer or norm, gets a vector of zeros `e` added, of one number a
channel. The inputs of linear layers and norms are cut off from what comes before them. A stream is then all that is
left between writers and norms: if `r . x` is taken of a norm's input x, with the same random r for all tokens, its
gradient with respect to `e` is a multiple of r exactly if the writer's channels arrive as they are, and a multiple of
`d r` if they arrive multiplied by a LayerScale d. Every other gradient means that something else happens in between.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..norms.layers import channel_axis, input_of
from .examples import Run
from .plan import FoldPlan
from .reduced import FoldedNorm

_CONVOLUTIONS = {'conv1d': 1, 'conv2d': 2, 'conv3d': 3}
_TOLERANCE = 1e-6  # some models resize position tokens in float32


@dataclass
class Writer:
    """A layer, norm, embedding or token that writes to a stream."""
    kind: str  # 'layer', 'norm', 'embedding', or 'token' for a parameter or buffer
    name: str  # of the module, for a token of the tensor
    scale: str = ''  # the parameter of a LayerScale behind it
    axis: int = 0  # of a token: the dimension of its channels


@dataclass
class Reader:
    """A norm, or a linear layer without a norm before it, that reads a stream."""
    name: str  # of the module
    is_norm: bool
    parts: int = 1  # tokens side by side in its input
    interleaved: bool = False  # whether the channels of these tokens alternate


@dataclass
class ResidualStream:
    """What writes and reads one residual stream of `width` channels; why its basis cannot change, or ''."""
    width: int
    writers: list[Writer] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    obstacle: str = ''

    @property
    def norms(self) -> list[str]:
        """The names of the norms that read it."""
        return [reader.name for reader in self.readers if reader.is_norm]


def find_streams(model: nn.Module, plan: FoldPlan, run: Run, dtype: torch.dtype | None) -> list[ResidualStream]:
    """The residual streams of a model, in the order in which their norms run.

    `model` is a copy of the plan's in `dtype`, with the folds of the plan applied.
    """
    probe = _Probe(model, plan)
    with torch.enable_grad(), probe:
        run(model, dtype)
    return _Grouping(probe).streams()


class _Probe(TorchFunctionMode):
    """Records the inputs of norms and linear layers, as functions of what writers write."""

    def __init__(self, model: nn.Module, plan: FoldPlan):
        super().__init__()
        self.layers: dict[int, str] = {}  # by the id of the weight
        self.reads: list[tuple[Reader, Tensor, int]] = []  # reader, its input, and the dimension of the channels
        self.ends: dict[tuple[str, str], Tensor] = {}  # the vectors that are added to outputs
        self.tensors: dict[str, Tensor] = {}  # the parameters and buffers that may be tokens or scales
        for name, module in model.named_modules():
            weight = getattr(module, 'weight', None)
            if isinstance(weight, Tensor):
                self.layers[id(weight)] = name
            if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
                self.layers[id(module.in_proj_weight)] = name
        for name, module in model.named_modules():
            if name in plan.norms and not isinstance(module, FoldedNorm):
                module.forward = self._norm_forward(name, plan.norms[name], module.forward)
        # A tensor that only the folded copy has pads for a norm, and changes with the norm's fold.
        names = {name for name, _ in (*plan.model.named_parameters(), *plan.model.named_buffers())}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in names and tensor.is_floating_point():
                self.tensors[name] = tensor.requires_grad_()

    def _norm_forward(self, name: str, norm: nn.Module, forward: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            x, _ = input_of(args, kwargs)
            axis = channel_axis(norm, kwargs)
            self.reads.append((Reader(name, True), x, axis))
            with torch.no_grad():
                y = forward(*args, **kwargs)
            if not isinstance(y, Tensor) or not y.is_floating_point():
                return y
            return self._written('norm', name, y.clone() if y is x else y, axis)

        return wrapped

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, '__name__', '')
        kind, axis = 'layer', -1
        if not torch.is_grad_enabled():  # inside of a norm
            return func(*args, **kwargs)
        if name == 'linear' or name in _CONVOLUTIONS:
            x, weight = [*args, *(kwargs[key] for key in ('input', 'weight') if key in kwargs)][:2]
            inputs, reader, writer = [x], weight, weight
            axis = -1 if name == 'linear' else x.dim() - 1 - _CONVOLUTIONS[name]
        elif name == 'multi_head_attention_forward':
            inputs, reader, writer = {id(x): x for x in args[:3]}.values(), args[5], args[11]
        elif func is F.embedding:
            kind, inputs, reader, writer = 'embedding', (), None, args[1]
        else:
            return func(*args, **kwargs)
        self.reads += [(Reader(self.layers.get(id(reader), ''), False), x, axis) for x in inputs]
        with torch.no_grad():
            output = func(*args, **kwargs)
        if id(writer) not in self.layers:
            return output
        y, *rest = output if isinstance(output, tuple) else (output, )
        y = self._written(kind, self.layers[id(writer)], y, axis)
        return (y, *rest) if rest else y

    def _written(self, kind: str, name: str, y: Tensor, axis: int) -> Tensor:
        """The output of a writer, plus its vector."""
        if (kind, name) not in self.ends:
            self.ends[kind, name] = y.new_zeros(y.shape[axis]).requires_grad_()
        return y + _along(self.ends[kind, name], y, axis)


def _along(vector: Tensor, x: Tensor, axis: int) -> Tensor:
    shape = [1] * x.dim()
    shape[axis] = -1
    return vector.view(shape)


@dataclass
class _Link:
    """How a writer arrives at a reader: `parts` tokens side by side, multiplied by a vector if it is not None."""
    parts: int = 1
    interleaved: bool = False
    scale: Tensor | None = None
    axis: int = 0  # of a token

    def split(self, r: Tensor) -> Tensor:
        """r for each token side by side, `(width, parts)`."""
        return r.view(-1, self.parts) if self.interleaved else r.view(self.parts, -1).mT


def _gradients(x: Tensor, r: Tensor, ends: dict[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
    """The gradients of `r . x` with respect to those of `ends` that reach x."""
    found = torch.autograd.grad((x * r).sum(), list(ends.values()), retain_graph=True, allow_unused=True)
    return {key: gradient for key, gradient in zip(ends, found, strict=True)
            if gradient is not None and gradient.numel()}


def _layouts(gradient: Tensor, r: Tensor) -> Iterator[_Link]:
    """The ways in which a writer with this gradient may arrive at a reader."""
    for axis in range(gradient.dim() - 1, -1, -1):
        width = gradient.shape[axis]
        if width > 1 and len(r) % width == 0:
            for interleaved in (False, True)[:len(r) // width]:
                yield _Link(len(r) // width, interleaved, axis=axis)


def _plain_link(gradient: Tensor, r: Tensor) -> _Link | None:
    """How a writer arrives at a reader as it is; None if its channels are mixed or changed."""
    for link in _layouts(gradient, r):
        split = link.split(r)
        rows = gradient.movedim(link.axis, -1).reshape(-1, len(split)).mT
        # How often the writer arrives at each of the tokens; padding is not written.
        multiples = torch.linalg.lstsq(split, rows).solution
        if link.parts < len(split) and (rows - split @ multiples).abs().max() <= _TOLERANCE * rows.abs().max():
            return link
    return None


def _scaled_link(first: Tensor, r: Tensor, second: Tensor, other: Tensor) -> _Link | None:
    """How a layer arrives at a reader multiplied by a vector, given its gradients for r and another r, or None."""
    for link in _layouts(first, r):
        scale, again = first / link.split(r).sum(1), second / link.split(other).sum(1)
        if (scale - again).abs().max() <= 10 * _TOLERANCE * scale.abs().max():
            return replace(link, scale=scale)
    return None


class _Grouping:
    """Groups readers and writers into streams."""

    def __init__(self, probe: _Probe):
        self._probe = probe
        self._links: dict[int, dict[tuple[str, str], _Link | None]] = {}  # by the number of the read
        self._scales: dict[tuple[str, str], str] = {}  # the parameter that multiplies a layer's output
        ends = {**probe.ends, **{('token', name): tensor for name, tensor in probe.tensors.items()}}
        generator = torch.Generator().manual_seed(0)
        for number, (_, x, axis) in enumerate(probe.reads):
            if not x.requires_grad:
                continue
            r, other = torch.randn(2, x.shape[axis], generator=generator, dtype=torch.float64).to(x)
            first = _gradients(x, _along(r, x, axis), ends)
            least = 1e-9 * max((gradient.abs().max().item() for gradient in first.values()), default=0.)
            links = {key: _plain_link(gradient, r) for key, gradient in first.items() if gradient.abs().max() > least}
            if scaled := [key for key, link in links.items() if link is None and key[0] == 'layer']:
                second = _gradients(x, _along(other, x, axis), ends)
                links.update({key: _scaled_link(first[key], r, second[key], other) for key in scaled})
            self._links[number] = links

    def streams(self) -> list[ResidualStream]:
        for linked in self._links.values():
            for key, link in linked.items():
                if link is not None and link.scale is not None and key not in self._scales:
                    self._scales[key] = self._scale_like(link.scale)
        self._ignored = {('token', name) for name in self._scales.values() if name}
        groups: list[set] = []  # of writers
        for number, linked in self._links.items():
            keys = self._keys(linked)
            if self._probe.reads[number][0].is_norm and keys or len(keys) > 1 and all(map(linked.get, keys)):
                joined = [group for group in groups if not group.isdisjoint(keys)]
                groups = [group for group in groups if group.isdisjoint(keys)] + [keys.union(*joined)]
        return [self._stream(group) for group in groups]

    def _keys(self, linked: dict) -> set[tuple[str, str]]:
        return {key for key in linked if key not in self._ignored
                and not (key[0] == 'token' and self._probe.tensors[key[1]].numel() == 1)}

    def _scale_like(self, scale: Tensor) -> str:
        """The name of the parameter whose values are a multiple of `scale`, or ''."""
        for name, tensor in self._probe.tensors.items():
            if tensor.numel() == scale.numel():
                values = tensor.detach().flatten()
                factor = (scale @ values) / (values @ values)
                if (scale - factor * values).abs().max() <= 1e-6 * scale.abs().max():
                    return name
        return ''

    def _stream(self, group: set) -> ResidualStream:
        stream, writers, readers = ResidualStream(0), {}, {}
        for number, linked in self._links.items():
            reader, x, axis = self._probe.reads[number]
            found = {key: linked[key] for key in self._keys(linked) if key in group}
            if not found:
                continue
            where = reader.name or 'a layer with a computed weight'
            if mixed := next((key[1] for key, link in found.items() if link is None or (
                    link.scale is not None) != bool(self._scales.get(key))), ''):
                stream.obstacle = stream.obstacle or f'{mixed} reaches {where} through other operations than sums'
                readers.setdefault((reader.name, reader.is_norm), (1, False))
                continue
            layouts = {(link.parts, link.interleaved) for link in found.values()}
            parts, interleaved = layouts.pop()
            if layouts or readers.get((reader.name, reader.is_norm), (parts, interleaved)) != (parts, interleaved):
                stream.obstacle = stream.obstacle or f'{where} reads it in several layouts'
                continue
            stream.width = x.shape[axis] // parts
            readers[reader.name, reader.is_norm] = parts, interleaved
            for key, link in found.items():
                writers[key] = link
        stream.writers = [Writer(*key, scale=self._scales.get(key, ''), axis=link.axis)
                          for key, link in writers.items()]
        stream.readers = [Reader(name, is_norm, *layout) for (name, is_norm), layout in readers.items()]
        if lost := group - writers.keys():
            stream.obstacle = stream.obstacle or f'{next(iter(lost))[1]} is no writer of it'
        return stream
