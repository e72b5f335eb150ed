"""Frees the gradient statistics of offline norms from the loss scale of mixed precision."""
from __future__ import annotations

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import Tensor, nn

from ..norms import OfflineNorm


def set_loss_scale(model: nn.Module, scaler: torch.amp.GradScaler | Tensor | None) -> None:
    """Tells the offline norms of a model what its loss is multiplied with, for the backward passes to come.

    In a loop of your own with a gradient scaler, before each `scaler.scale(loss).backward()`. Without it, the
    gradient statistics carry the scale, and are off by a factor for some steps after each change of it. Does
    not wait for the device.

    Args:
        model (nn.Module): with norms of any device.
        scaler (GradScaler | Tensor, optional): the gradient scaler, or the factor itself `()`; None is 1.
    """
    norms = [module for module in model.modules() if isinstance(module, OfflineNorm)]
    scales: dict[torch.device, Tensor | None] = {}
    for norm in norms:
        device = norm.running_var.device
        if device not in scales:
            if isinstance(scaler, torch.amp.GradScaler):
                scales[device] = scaler.scale(torch.ones((), device=device))
            else:
                scales[device] = None if scaler is None else scaler.detach().clone().to(device)
        norm.loss_scale = scales[device]


@HOOKS.register_module()
class LossScaleHook(Hook):
    """Tells the norms the loss scale of each step, where the optimizer wrapper has one (AmpOptimWrapper)."""

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
        if scaler is not None:
            set_loss_scale(runner.model, scaler)
