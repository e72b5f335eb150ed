"""What folding knows of a model: looked up once, found out and checked in one direction, then applied."""
from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from ..norms.layers import is_norm
from .affine import Affine, affine_of, class_obstacle
from .report import Fold
from .rules import Fact, Factor, facts, join


class FoldPlan:
    """The modules of a model, its norms with what each computes, what rules say, and the folds; all by full name.

    The folds and all that is computed are of names and tensors, so that a plan can be applied to a copy of the model.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.owners = Owners(model)
        self.facts = {name: facts(module) for name, module in self.modules.items()}
        self.norms = {name: module for name, module in self.modules.items() if is_norm(module)}
        self.affines: dict[str, Affine] = {}  # of the norms that have one
        self.obstacles = {name: self._look_at(name, norm) for name, norm in self.norms.items()}
        self.folds: list[Fold] = []

    def _look_at(self, name: str, norm: nn.Module) -> str:
        """Notes what a norm computes; why it cannot be folded into anything, or ''."""
        if obstacle := class_obstacle(norm) or call_obstacle(norm):
            return obstacle
        affine = affine_of(norm)
        if not all(value.isfinite().all() for value in affine):
            return 'its scale or shift is not finite'
        self.affines[name] = affine
        return ''

    def said(self, kind) -> list[tuple[str, Fact]]:
        """The facts of a kind with the module that each is about, once for each module."""
        seen, found = set(), []
        for name, module in self.modules.items():
            if id(module) not in seen:
                seen.add(id(module))
                found += [(name, fact) for fact in self.facts[name] or () if isinstance(fact, kind)]
        return found

    @property
    def factors(self) -> list[tuple[str, str, list[str]]]:
        """The connections that a factor can be taken from, the layers for it, and the modules between."""
        return [(join(name, fact.residual), join(name, fact.last), [join(name, each) for each in fact.between])
                for name, fact in self.said(Factor)]


def call_obstacle(module: nn.Module) -> str:
    """Why calling `module` may do more than its class says."""
    if module._forward_hooks or module._forward_pre_hooks:
        return 'has forward hooks'
    return 'has another forward than its class' if 'forward' in vars(module) else ''


class Owners:
    """Who else holds a module, or the memory of its parameters."""

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
