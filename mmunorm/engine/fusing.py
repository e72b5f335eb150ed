"""Folding inside mmengine's Runner."""
from __future__ import annotations

from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS

from ..fusion import fuse_norms


@HOOKS.register_module()
class FuseNormsHook(Hook):
    """Folds the model's norms before a test, once its checkpoint is loaded, and logs what went where."""

    def before_test(self, runner) -> None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        model.eval()
        runner.logger.info(f'fuse_norms: {fuse_norms(model)}')


def fuse_before_test(cfg: Config) -> None:
    """Makes a test run of `cfg` fold the model first."""
    # A checkpoint's weights are the averaged ones already; EMAHook would exchange them for its own copy,
    # which is not folded.
    hooks = [hook for hook in cfg.get('custom_hooks') or []
             if not (isinstance(hook, dict) and str(hook.get('type')).endswith('EMAHook'))]
    cfg.custom_hooks = [*hooks, dict(type='FuseNormsHook')]
