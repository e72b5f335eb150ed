"""Folding inside mmengine's Runner, and what several hooks ask of that."""
from __future__ import annotations

from mmengine.hooks import CheckpointHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from torch import nn

from .fusion import fuse_norms


def unwrapped_model(runner) -> nn.Module:
    """The model itself, without DistributedDataParallel or the like around it."""
    return runner.model.module if is_model_wrapper(runner.model) else runner.model


def saves_after_this_step(runner) -> bool:
    """Whether a CheckpointHook that counts steps saves after this step; for use in `after_train_iter`."""
    return any(isinstance(hook, CheckpointHook) and not hook.by_epoch
               and (hook.every_n_train_iters(runner, hook.interval, hook.save_begin)
                    or (hook.save_last and hook.is_last_train_iter(runner)))
               for hook in runner.hooks)


def loss_scale(runner) -> float:
    """The factor of the loss in this step's backward pass; 1 without a gradient scaler. Waits for a GPU."""
    scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
    return scaler.get_scale() if hasattr(scaler, 'get_scale') else 1.


@HOOKS.register_module()
class FuseNormsHook(Hook):
    """Folds the model's norms before a test, after its checkpoint is loaded, and logs what went where.

    Attributes:
        report (FusionReport): what went where, after folding.
        meta (dict): of the checkpoint.
    """

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        self.meta = checkpoint.get('meta', {})

    def before_test(self, runner) -> None:
        model = unwrapped_model(runner)
        model.eval()
        self.report = fuse_norms(model)
        runner.logger.info(f'fuse_norms: {self.report}')
