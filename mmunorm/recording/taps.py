"""Measures one norm while a model trains."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..compat import in_backward_pass
from ..norms import OfflineNorm
from ..norms.kernels import second_moment, statistics_dtype, variance_and_mean
from ..norms.layers import channel_axis, input_of
from .record import OFFLINE_GRADIENT, ONLINE_GRADIENT


def gradient_kind(norm: nn.Module) -> str:
    """Which statistic of the gradient is recorded for a norm; it goes into :class:`.record.Layer`."""
    is_offline = isinstance(norm, OfflineNorm) and not norm.blends_another or isinstance(norm, _BatchNorm)
    return OFFLINE_GRADIENT if is_offline else ONLINE_GRADIENT


class Tap:
    """Takes the statistics of one norm during a training step.

    For an offline norm `g` costs nothing: the gradient of gamma, summed over tokens, is `sum(dy * z)`.

    Args:
        norm: the layer.
        block: `(rows, 2, C)`, where activation and gradient statistics go.
        mean: `(C,)`, where the mean of the input goes in row 0.
        offline: whether the gradient statistic is `g`.
    """

    def __init__(self, norm: nn.Module, block: Tensor, mean: Tensor, offline: bool):
        self.norm = norm
        self.block = block
        self.mean = mean
        self.offline = offline
        self.row = None
        self.handles = []
        self.attach()

    def attach(self) -> None:
        """Puts the hooks on the norm."""
        self.handles.append(self.norm.register_forward_hook(self._on_forward, with_kwargs=True))
        weight = getattr(self.norm, 'weight', None)
        if self.offline and weight is not None and weight.requires_grad:
            self.handles.append(weight.register_hook(self._on_weight_gradient))

    def open(self, row: int) -> None:
        """Begins a step whose statistics go to `row`."""
        self.row = row
        self.tokens = 0
        self.gradient_tokens = 0

    def close(self) -> None:
        """Ends the step. What runs before the next step is not recorded."""
        self.row = None

    def remove(self) -> None:
        """Takes the hooks from the norm."""
        while self.handles:
            self.handles.pop().remove()

    def _on_forward(self, norm, args, kwargs, output) -> None:
        if self.row is None:
            return
        axis = channel_axis(norm, kwargs)
        if not self.offline and output.requires_grad:
            row = self.row
            output.register_hook(lambda dy: self._on_output_gradient(row, dy.movedim(axis, -1)))
        if in_backward_pass():
            return  # the second forward of activation checkpointing
        x, pad_mask = input_of(args, kwargs)
        if x.numel() == 0:
            return
        valid = ~pad_mask if isinstance(pad_mask, Tensor) and pad_mask.dtype == torch.bool else None
        with torch.no_grad():
            x = x.detach().movedim(axis, -1)
            tokens = x.shape[:-1].numel() if valid is None else valid.sum()
            self._average(self.block[self.row, 0], second_moment(x, valid), self.tokens, tokens)
            if self.row == 0:
                self._average(self.mean, variance_and_mean(x, valid)[1], self.tokens, tokens)
        self.tokens = self.tokens + tokens

    def _on_output_gradient(self, row: int, dy: Tensor) -> None:
        if row != self.row:
            return
        tokens = dy.shape[:-1].numel()
        self._average(self.block[row, 1], second_moment(dy), self.gradient_tokens, tokens)
        self.gradient_tokens += tokens

    def _on_weight_gradient(self, dweight: Tensor) -> None:
        if self.row is None or (isinstance(self.tokens, int) and self.tokens == 0):
            return
        weight = self.norm.weight.detach()
        dtype = statistics_dtype(weight.dtype)
        g = weight.to(dtype) * dweight.detach().to(dtype) / self.tokens
        target = self.block[self.row, 1]
        # A layer that several checkpointed segments share gets its gradient in parts.
        target.copy_(g if self.gradient_tokens == 0 else target + g)
        self.gradient_tokens += 1

    @staticmethod
    def _average(target: Tensor, new: Tensor, old_tokens, new_tokens) -> None:
        """Merges the mean over further tokens into the mean that `target` holds."""
        if isinstance(old_tokens, int) and old_tokens == 0:
            target.copy_(new)
        else:
            target.mul_(old_tokens).add_(new * new_tokens).div_(old_tokens + new_tokens)
