"""Finds residual streams: the layers and parameters that write the input of each norm, by gradients of one run.

Each candidate for a writer, the output of a linear layer or norm, gets a vector of zeros `e` added, of one number a
channel. The inputs of linear layers and norms are cut off from what comes before them. A stream is then all that is
left between writers and norms: if `r . x` is taken of a norm's input x, with the same random r for all tokens, its
gradient with respect to `e` is a multiple of r exactly if the writer's channels arrive as they are, and a multiple of
`d r` if they arrive multiplied by a LayerScale d. Every other gradient means that something else happens in between.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..norms.layers import channel_axis, input_of
from .examples import Run
from .plan import FoldPlan
from .reduced import FoldedNorm

_CONVOLUTIONS = {'conv1d': 1, 'conv2d': 2, 'conv3d': 3}


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
    return _streams(probe)


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
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point():
                self.tensors[name] = tensor.requires_grad_()

    def end(self, kind: str, name: str, width: int, like: Tensor) -> Tensor:
        """The vector that is added to the output of a writer."""
        key = kind, name
        if key not in self.ends:
            self.ends[key] = like.new_zeros(width).requires_grad_()
        return self.ends[key]

    def _norm_forward(self, name: str, norm: nn.Module, forward: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            x, _ = input_of(args, kwargs)
            axis = channel_axis(norm, kwargs)
            self.reads.append((Reader(name, True), x, axis))
            with torch.no_grad():
                y = forward(*args, **kwargs)
            if not isinstance(y, Tensor) or not y.is_floating_point():
                return y
            y = y.clone() if y is x else y
            return y + _along(self.end('norm', name, y.shape[axis], y), y, axis)

        return wrapped

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, '__name__', '')
        if not torch.is_grad_enabled():  # inside of a norm
            return func(*args, **kwargs)
        if name == 'linear' or name in _CONVOLUTIONS:
            return self._layer(name, func, args, kwargs)
        if name == 'multi_head_attention_forward':
            return self._attention(func, args, kwargs)
        if func is F.embedding:
            return self._embedding(func, args, kwargs)
        return func(*args, **kwargs)

    def _layer(self, kind: str, func, args: tuple, kwargs: dict) -> Tensor:
        x, weight = [*args, *(kwargs[key] for key in ('input', 'weight') if key in kwargs)][:2]
        name = self.layers.get(id(weight))
        axis = -1 if kind == 'linear' else x.dim() - 1 - _CONVOLUTIONS[kind]
        self.reads.append((Reader(name or '', False), x, axis))
        with torch.no_grad():
            y = func(*args, **kwargs)
        return y if name is None else y + _along(self.end('layer', name, y.shape[axis], y), y, axis)

    def _attention(self, func, args: tuple, kwargs: dict):
        name = self.layers.get(id(args[5]))
        for x in {id(x): x for x in args[:3]}.values():
            self.reads.append((Reader(name or '', False), x, -1))
        with torch.no_grad():
            y, *rest = func(*args, **kwargs)
        name = self.layers.get(id(args[11]))
        return (y if name is None else y + self.end('layer', name, y.shape[-1], y), *rest)

    def _embedding(self, func, args: tuple, kwargs: dict) -> Tensor:
        with torch.no_grad():
            y = func(*args, **kwargs)
        name = self.layers.get(id(args[1]))
        return y if name is None else y + self.end('embedding', name, y.shape[-1], y)


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


def _streams(probe: _Probe) -> list[ResidualStream]:
    keys = [*probe.ends, *(('token', name) for name in probe.tensors)]
    leaves = [*probe.ends.values(), *probe.tensors.values()]
    generator = torch.Generator().manual_seed(0)
    links: dict[int, dict[tuple[str, str], _Link | None]] = {}  # by the number of the read
    for number, (_, x, axis) in enumerate(probe.reads):
        if not x.requires_grad:
            continue
        vectors = torch.randn(2, x.shape[axis], generator=generator, dtype=torch.float64).to(x)
        first, second = ([None if g is None else g.detach() for g in torch.autograd.grad(
            (x * _along(r, x, axis)).sum(), leaves, retain_graph=True, allow_unused=True)] for r in vectors)
        least = 1e-9 * max((g.abs().max().item() for g in first if g is not None and g.numel()), default=0.)
        links[number] = {
            key: _link(key[0], one, other, *vectors) for key, one, other in zip(keys, first, second, strict=True)
            if one is not None and one.numel() and one.abs().max() > least}
    return _Grouping(probe, links).streams()


def _link(kind: str, first: Tensor, second: Tensor, r: Tensor, other: Tensor) -> _Link | None:
    """How a writer with these gradients arrives at a reader; None if its channels are mixed or changed."""
    tolerance = 1e-6  # some models resize position tokens in float32
    for axis in range(first.dim() - 1, -1, -1):
        width = first.shape[axis]
        if width < 2 or len(r) % width:
            continue
        parts = len(r) // width
        for interleaved in (False, True)[:parts]:
            # For each token side by side, `(width, parts)`.
            split, again = (v.view(width, parts) if interleaved else v.view(parts, width).mT for v in (r, other))
            rows = first.movedim(axis, -1).reshape(-1, width).mT
            # How often the writer arrives at each of the tokens; padding is not written.
            multiples = torch.linalg.lstsq(split, rows).solution
            if parts < width and (rows - split @ multiples).abs().max() <= tolerance * rows.abs().max():
                return _Link(parts, interleaved, axis=axis)
            if kind == 'layer':
                scale = first / split.sum(1)
                if (scale - second / again.sum(1)).abs().max() <= 10 * tolerance * scale.abs().max():
                    return _Link(parts, interleaved, scale=scale)
    return None


class _Grouping:
    """Groups readers and writers into streams."""

    def __init__(self, probe: _Probe, links: dict[int, dict[tuple[str, str], _Link | None]]):
        self._probe, self._links = probe, links
        self._scales: dict[tuple[str, str], str] = {}  # the parameter that multiplies a layer's output

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
