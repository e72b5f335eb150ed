"""The plan of a model's folding: filled by the steps find and check, then applied."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..norms.layers import is_norm
from .folds import Fold, JointFold, ancestors, join
from .norms import Affine, affine_of, class_obstacle
from .obstacles import Obstacle
from .rules import Example, Fills, Pad, facts


class FoldPlan:
    """The modules of a model, its norms with their affine parts, fold rules and folds, by name; also of its copies."""

    def __init__(self, model: nn.Module, layer_norms: str = 'exact'):
        self.model = model
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self._memory = [(name, *_span(tensor)) for name, tensor in tensors if tensor.layout == torch.strided]
        self.norms = {name: module for name, module in self.modules.items() if is_norm(module)}
        self.affines: dict[str, Affine] = {}  # of the norms that have one
        self.obstacles = {name: self._obstacle(name, norm, layer_norms) for name, norm in self.norms.items()}
        self.example: Example | None = None
        self.fills: dict[str, Pad] = {}
        self.joints: list[JointFold] = []
        for name, module in model.named_modules():
            for fact in facts(module):
                if isinstance(fact, Example):
                    self.example = self.example if name else fact
                elif isinstance(fact, Fills):
                    self.fills[name] = fact.pad
                else:
                    self.joints.append(fact.within(name))
        self.joint_of = {norm: joint for joint in self.joints for norm in joint.norms}
        self.copyable = {layer for joint in self.joints for layer in joint.copies}
        self.folds: dict[str, Fold] = {}  # by norm
        self.rotations: list = []  # of residual streams
        self.attentions: list = []  # that are rewritten
        # From the outermost, the modules within all of whose calls a norm or layer ran; and those within all of whose
        # calls another module returns the channels of a source, by its kind and name.
        self.chains: dict[str, tuple[str, ...]] = {}
        self.receivers: dict[tuple[str, str], tuple[str, ...]] = {}

    def _obstacle(self, name: str, norm: nn.Module, layer_norms: str) -> Obstacle | None:
        """Stores the affine part of a norm. Returns why it cannot be folded, or None."""
        if obstacle := class_obstacle(norm, layer_norms) or call_obstacle(norm) or self.held_elsewhere(name):
            return obstacle
        affine = affine_of(norm)
        if not all(value.isfinite().all() for value in affine):
            return Obstacle('infinite')
        self.affines[name] = affine
        return None

    def held_elsewhere(self, name: str) -> Obstacle | None:
        """What else holds the weights of a layer or norm, or None: another part of the model, or an adapter that it is
        in, which may be merged or taken out later, as those of peft."""
        if shared := self.other_name(name):
            return Obstacle('shared', shared)
        for kind in (type(self.modules[around]) for around in ancestors(name)):
            if callable(getattr(kind, 'merge', None)) and callable(getattr(kind, 'unmerge', None)):
                return Obstacle('merge', kind.__name__)
        return None

    def other_name(self, name: str) -> str:
        """Another name of a module or of one of its parameters in the model, or ''."""
        module = self.modules[name]
        if others := [alias for alias, other in self.modules.items() if other is module and alias != name]:
            return others[0]
        return self.overlapping([join(name, parameter) for parameter, _ in module.named_parameters()])

    def overlapping(self, names: Sequence[str]) -> str:
        """Another parameter or buffer that shares memory with one of these, or ''."""
        for _, start, end in [memory for memory in self._memory if memory[0] in names]:
            for alias, other_start, other_end in self._memory:
                if alias not in names and other_start < end and start < other_end:
                    return alias
        return ''

    def folds_of(self, joint: JointFold) -> list[Fold]:
        """The folds of the norms of a joint fold."""
        return [self.folds[norm] for norm in joint.norms if norm in self.folds]


def call_obstacle(module: nn.Module) -> Obstacle | None:
    """Why calling `module` may do more than the forward of its class, or None."""
    if module._forward_hooks or module._forward_pre_hooks:
        return Obstacle('hooks')
    return Obstacle('other forward') if 'forward' in vars(module) else None


def _span(parameter: torch.Tensor) -> tuple[int, int]:
    start = parameter.data_ptr() or id(parameter)
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return start, start + (last + 1) * parameter.element_size()
