"""The hook for training with residual schemes."""
from __future__ import annotations

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import nn

from mmunorm.engine.runner import unwrapped_model

from .residuals import BranchNorm, count_updates, profile_admin
from .residuals.admin import admins
from .residuals.clock import clocks


@HOOKS.register_module()
class ResidualHook(Hook):
    """Counts optimizer updates for BranchNorm, and profiles Admin before the first step; `tools/train.py` adds it.

    It warns if the run ends before BranchNorm's T. Admin measures one training batch in runs that start from new
    weights.
    """

    def before_train(self, runner) -> None:
        model = unwrapped_model(runner)
        for clock in clocks(model):
            if not clock.is_counted:  # another `train()` of the same Runner continues with the same optimizer
                count_updates(model, runner.optim_wrapper.optimizer)
        if warning := _warmup_warning(model, runner):
            runner.logger.warning(warning)
        connections = admins(model)
        # Admin is built with weights of 1.
        if runner.iter == 0 and connections and all(torch.all(admin.weight == 1) for admin in connections):
            batch = model.data_preprocessor(next(iter(runner.train_dataloader)), training=True)
            model.train()
            profile_admin(model, lambda: model(**batch, mode='loss'))
            runner.logger.info(f'Admin: {len(connections)} residual connections were initialized from a batch.')


def _warmup_warning(model: nn.Module, runner) -> str:
    """A warning if the run ends before BranchNorm's branches have their full weight, or ''."""
    branch = next((module for module in model.modules() if isinstance(module, BranchNorm)), None)
    if branch is None:
        return ''
    # The last, incomplete accumulation of the run is an update, too.
    left = -(-(runner.max_iters - runner.iter) // runner.optim_wrapper._accumulative_counts)
    end = int(clocks(model)[0].updates) + left
    if end >= branch.warmup_iters:
        return ''
    return (f"BranchNorm's branches never reach their full weight: the run ends at update {end}, "
            f'and warmup_iters={branch.warmup_iters}. Choose a smaller warmup_iters in residual_cfg.')
