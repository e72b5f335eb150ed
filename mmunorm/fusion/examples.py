"""Runs of a model on examples: the inputs, other sizes of them, and a copy of the model."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..modules import map_tensors, tensors_in
from .operators import CASTS
from .rules import Example


@dataclass(frozen=True)
class Run:
    """One call of a model."""
    example: Tensor | tuple | dict | Callable
    is_required: bool = True  # whether it must succeed

    def with_hidden_states(self) -> Run:
        """The same call of a model of transformers, which also returns the tokens between its layers, if it can."""
        example = self.example if isinstance(self.example, dict) else dict(pixel_values=self.example)
        return Run({**example, 'output_hidden_states': True}, is_required=False)

    def __call__(self, model: nn.Module, dtype: torch.dtype | None = None):
        """Returns the outputs of the model on the example, cast to `dtype`."""
        def copied(tensor: Tensor) -> Tensor:  # the model may write to it
            return tensor.detach().to(dtype if tensor.is_floating_point() else None, copy=True)

        with KeepsPrecision() if dtype == torch.float64 else nullcontext():
            if callable(self.example):
                return self.example(model)
            example = map_tensors(copied, self.example)
            if isinstance(example, dict):
                return model(**example)
            return model(*example) if isinstance(example, tuple) else model(example)


class KeepsPrecision(TorchFunctionMode):
    """Leaves float64 tensors what they are where a model casts them, such as position tokens that it resizes, and lets
    layers in float64 take what is made in float32. Otherwise two copies in float64 could not be compared."""
    _LAYERS = frozenset([F.linear, F.conv1d, F.conv2d, F.conv3d])

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self._LAYERS and len(args) > 1 and args[0].is_floating_point():
            args = (args[0].to(args[1].dtype), *args[1:])
        output = func(*args, **(kwargs or {}))
        if getattr(func, '__name__', '') in CASTS and isinstance(output, Tensor) and (
                args[0].dtype == torch.float64 and output.is_floating_point() and output.dtype != torch.float64):
            return args[0].to(output.device)
        return output


def runs_of(example) -> list[Run]:
    """The runs for an example of :func:`mmunorm.fuse_norms`. Raises a TypeError if it is of another type."""
    if isinstance(example, Example):
        return [Run(call, is_required=False) for call in example.runs]
    examples = example if isinstance(example, list) else [example]
    if not examples:
        raise TypeError('example: the list is empty')
    runs = []
    for one in examples:
        one = dict(one) if isinstance(one, Mapping) else one  # such as what transformers' image processors return
        if not isinstance(one, (Tensor, tuple, dict)) and (not callable(one) or isinstance(one, (nn.Module, type))):
            raise TypeError('example: must be a tensor, a tuple of arguments, a dict of keyword arguments, a function '
                            f'that takes the model and runs it, or a list of these, got {type(one).__name__}')
        runs += [Run(one), *(Run(other, is_required=False) for other in _other_sizes(one))]
    return runs


def _other_sizes(example) -> Iterator[Tensor]:
    """Images and sequences of other sizes: a model that needs no padding at one size may pad at another."""
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


def copy_of(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a model in eval mode, of `dtype` or its own. Raises a RuntimeError if it cannot be copied."""
    # Computed tensors, such as a pruned weight, are copied without their graph.
    values = (value for module in model.modules() for name, value in vars(module).items() if name != '_modules')
    memo = {id(tensor): tensor.detach().clone() for tensor in tensors_in([*values], 3) if not tensor.is_leaf}
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise RuntimeError(f'model: folding runs a copy of it, and it cannot be copied: '
                           f'{type(error).__name__}: {error}') from error
    # A copy of a torch.fx module is in training mode.
    twin.eval()  # mmpretrain's backbones return None
    return twin if dtype is None else twin.to(dtype)
