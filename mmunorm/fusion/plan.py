"""The plan of a model's folding: filled by the steps find and check, then applied."""
from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from ..norms.layers import is_norm
from .affine import Affine, affine_of, class_obstacle
from .report import Fold
from .rules import Example, Factor, Fills, Pad, Station, Stream, Unties, facts, join


class FoldPlan:
    """The modules of a model, its norms with their affine parts, fold rules and folds, all by name.

    The plan of a model also applies to its copies.
    """

    def __init__(self, model: nn.Module, layer_norms: str = 'exact'):
        self.model = model
        self._layer_norms = layer_norms
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.owners = Owners(model)
        self.norms = {name: module for name, module in self.modules.items() if is_norm(module)}
        self.affines: dict[str, Affine] = {}  # of the norms that have one
        self.obstacles = {name: self._look_at(name, norm) for name, norm in self.norms.items()}
        self.example: Example | None = None
        self.fills: dict[str, Pad] = {}
        self.streams: list[Stream] = []
        self.factors: list[tuple[str, str, list[str]]] = []  # connection, its last layer, and the modules between
        self.untied: set[str] = set()
        for name, module in model.named_modules():
            self._note_facts(name, module)
        # For each norm in a stream: the stream, and the sublayer that consumes the norm, None after the last one.
        self.stations: dict[str, tuple[Stream, Station | None]] = {
            station.norm: (stream, reader) for stream in self.streams
            for station, reader in zip(stream.stations, (*stream.stations[1:], None), strict=True)}
        self.folds: list[Fold] = []
        self.changes: list = []  # of the bases of residual streams

    def _look_at(self, name: str, norm: nn.Module) -> str:
        """Stores the affine part of a norm. Returns why it cannot be folded, or ''."""
        if obstacle := class_obstacle(norm, self._layer_norms) or call_obstacle(norm):
            return obstacle
        if shared := self.owners.others(name, norm):
            return f'is shared with {shared}'
        affine = affine_of(norm)
        if not all(value.isfinite().all() for value in affine):
            return 'its scale or shift is not finite'
        self.affines[name] = affine
        return ''

    def _note_facts(self, name: str, module: nn.Module) -> None:
        for fact in facts(module):
            if isinstance(fact, Example):
                self.example = self.example if name else fact
            elif isinstance(fact, Fills):
                self.fills[name] = fact.pad
            elif isinstance(fact, Stream):
                self.streams.append(fact.within(name))
            elif isinstance(fact, Factor):
                self.factors.append((join(name, fact.residual), join(name, fact.last),
                                     [join(name, each) for each in fact.between]))
            elif isinstance(fact, Unties):
                self.untied.add(join(name, fact.layer))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without wrappers that only call it: torch.compile's, DDP's, averaged models."""
    while True:
        parts = [name for name, _ in model.named_children()]
        if '_orig_mod' in parts:
            model = model._orig_mod
        elif parts == ['module'] and type(model).__module__.partition('.')[0] in ('torch', 'mmengine'):
            model = model.module
        else:
            return model


def call_obstacle(module: nn.Module) -> str:
    """Why calling `module` may do more than the forward of its class, or ''."""
    if module._forward_hooks or module._forward_pre_hooks:
        return 'has forward hooks'
    return 'has another forward than its class' if 'forward' in vars(module) else ''


class Owners:
    """Finds modules that are shared, or whose parameters share memory."""

    def __init__(self, model: nn.Module):
        self._names = defaultdict(list)
        for name, module in model.named_modules(remove_duplicate=False):
            self._names[id(module)].append(name)
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self._memory = [(name, *_span(tensor)) for name, tensor in tensors if tensor.layout == torch.strided]

    def others(self, name: str, module: nn.Module) -> str:
        """Another name of the module or of one of its parameters in the model, or ''."""
        if others := [alias for alias in self._names[id(module)] if alias != name]:
            return others[0]
        own = {join(name, parameter) for parameter, _ in module.named_parameters()}
        for start, end in map(_span, module.parameters()):
            for alias, other_start, other_end in self._memory:
                if alias not in own and other_start < end and start < other_end:
                    return alias
        return ''


def _span(parameter: torch.Tensor) -> tuple[int, int]:
    start = parameter.data_ptr() or id(parameter)
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return start, start + (last + 1) * parameter.element_size()
