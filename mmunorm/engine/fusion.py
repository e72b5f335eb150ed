"""Folding inside mmengine's Runner."""
from __future__ import annotations

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ..fusion import fuse_norms
from .runner import unwrapped_model


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
