"""Unified Normalization (Algorithm 2 with Eq. 18-19 of arXiv 2208.01313): spec section 3, step by step."""
from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from mmengine.registry import MODELS
from torch import Tensor

from . import kernels
from .averages import arithmetic_mean, geometric_mean, is_outlier, moving_average, push
from .base import OfflineNorm, check_count, normalize


class _Step(NamedTuple):
    """What the forward pass decided on one training step."""
    var_hat: Tensor  # (C,)
    settled: Tensor  # () bool: past warm-up, with full records
    outlier: Tensor  # () bool: every moving average is dropped for this step


@MODELS.register_module()
class UN(OfflineNorm):
    """Unified Normalization over tokens: trains like LayerNorm, and is one multiply and add at inference.

    Training normalizes by the geometric mean of the last `window` mean squares, estimates the gradient
    by a moving average over the arithmetic mean of the last `window` gradient statistics, and drops every
    average on a step whose statistics hold an outlier (Eq. 18-19). During warm-up each step uses its own
    statistic, with the exact gradient. A channel whose statistic is not finite takes `running_var`
    (in the backward pass `psi`) in its place, so inf and NaN never stay in the state.

    Activation checkpointing is seen, and its second forward is the same step, as long as a layer runs
    once between two backward passes.

    All state is in `state_dict`: beside `weight`, `bias`, `running_var` (C) and `num_batches_tracked`
    (steps), the buffers `activation_record` (M, C), `gradient_record` (M, C), `psi` (C) and
    `num_outliers` (outlier steps).

    Args:
        num_features (int): channels C of the `(..., C)` input.
        window (int | tuple[int, int]): M, how many steps are averaged; a pair is (forward, backward).
            Defaults to 4.
        alpha (float): weight of the OLD value in `running_var` and `psi` (Eq. 12), in [0, 1); 1 minus
            what BatchNorm calls momentum. Defaults to 0.9.
        warmup_iters (int): training steps with exact statistics. Defaults to 4000, right for COCO and
            ImageNet; a short run needs fewer.
        outlier_filter (bool): recommended for vision. Defaults to True.
        outlier_variance (str): 'layer' takes V in Eq. 19 as one number over all channels; 'channel' as one
            for each channel, which fires on nearly every step and is there for study. Defaults to 'layer'.
        eps (float): added to the variance. Defaults to 1e-5.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self,
                 num_features: int,
                 window: int | tuple[int, int] = 4,
                 alpha: float = 0.9,
                 warmup_iters: int = 4000,
                 outlier_filter: bool = True,
                 outlier_variance: str = 'layer',
                 eps: float = 1e-5):
        super().__init__(num_features, eps=eps, alpha=alpha)
        self.window = _check_window(window)
        self.warmup_iters = check_count('warmup_iters', warmup_iters, least=0)
        if outlier_variance not in ('layer', 'channel'):
            raise ValueError(f"outlier_variance must be 'layer' or 'channel', got {outlier_variance!r}")
        self.outlier_filter = outlier_filter
        self.outlier_variance = outlier_variance
        forward_window, backward_window = self.window
        self.register_buffer('activation_record', torch.ones(forward_window, num_features))
        self.register_buffer('gradient_record', torch.zeros(backward_window, num_features))
        self.register_buffer('psi', torch.zeros(num_features))
        self.register_buffer('num_outliers', torch.tensor(0, dtype=torch.long))
        self._last_step: _Step | None = None

    def restart_warmup(self) -> None:
        """Begins again at step 1, for a new task: forgets steps, outliers and gradient statistics.

        `weight`, `bias` and `running_var` stay.
        """
        for buffer in (self.num_batches_tracked, self.num_outliers, self.psi, self.gradient_record):
            buffer.zero_()
        self.activation_record.fill_(1)

    def _training_step(self, x: Tensor, valid: Tensor | None) -> Tensor:
        # Activation checkpointing runs the forward again inside the backward pass: the SAME step.
        recomputed = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if not recomputed or self._last_step is None:
            with torch.no_grad():
                self._last_step = self._record_activation(kernels.second_moment(x, valid))
        step = self._last_step
        return normalize(x, self.weight, self.bias, step.var_hat, valid, self.eps,
                         partial(self._record_gradient, step))

    def _record_activation(self, s: Tensor) -> _Step:
        s = torch.where(s.isfinite(), s, self.running_var)
        self.num_batches_tracked.add_(1)
        settled = self.num_batches_tracked > max(self.warmup_iters, *self.window)
        omega_prev = self.activation_record.to(s.dtype)
        omega = push(omega_prev, s)
        outlier = torch.zeros_like(settled)
        if self.outlier_filter:
            outlier = settled & is_outlier(omega, omega_prev, self.outlier_variance == 'channel')
        var_hat = s
        if self.window[0] > 1:  # the mean of a single step is that step, without rounding
            var_hat = torch.where(settled & ~outlier, geometric_mean(omega), s)
        self.activation_record.copy_(push(omega_prev, torch.where(outlier, self.running_var, s)))
        self.running_var.copy_(moving_average(self.running_var, var_hat, self.alpha))
        self.num_outliers.add_(outlier)
        return _Step(var_hat, settled, outlier)

    def _record_gradient(self, step: _Step, g: Tensor) -> Tensor:
        """Records this step's gradient statistic and returns the `psi` to use (backward steps 2-4)."""
        g = torch.where(g.isfinite(), g, self.psi)
        record = push(self.gradient_record.to(g.dtype), torch.where(step.outlier, self.psi, g))
        target = torch.where(step.settled, arithmetic_mean(record), g)
        psi = torch.where(step.outlier, self.psi, moving_average(self.psi, target, self.alpha))
        self.gradient_record.copy_(record)
        self.psi.copy_(psi)
        return torch.where(step.settled & ~step.outlier, psi, g)

    def extra_repr(self) -> str:
        return (f'{super().extra_repr()}, window={self.window}, warmup_iters={self.warmup_iters}, '
                f'outlier_filter={self.outlier_filter}')


@MODELS.register_module()
class UN2d(UN):
    """:class:`UN` for `(N, C, H, W)` maps: every position is a token.

    `pad_mask` is `(N, H, W)`. The output keeps the shape and dtype; its memory may be channels-last.
    """

    def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        if x.dim() != 4:
            raise ValueError(f'UN2d: x must be (N, C, H, W), got shape {tuple(x.shape)}')
        return super().forward(x.permute(0, 2, 3, 1), pad_mask).permute(0, 3, 1, 2)


def _check_window(window) -> tuple[int, int]:
    pair = (window, window) if isinstance(window, int) else window
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f'window must be an int or a pair (forward, backward) of ints, got {window!r}')
    return tuple(check_count('window', size, least=1) for size in pair)
