"""Folding inside mmengine's Runner."""
from __future__ import annotations

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ..fusion import fuse_norms
from .runner import unwrapped_model


@HOOKS.register_module()
class FuseNormsHook(Hook):
    """Folds the model's norms before a test, after its checkpoint is loaded, and logs what went where.

    Args:
        layer_norms (str): whether LayerNorms and RMSNorms are folded, 'exact' or 'keep'. Defaults to 'exact'.
        rotate (str, optional): 'hadamard' rotates the residual streams. Defaults to None.

    Attributes:
        report (FusionReport): what went where, after folding.
        meta (dict): of the checkpoint.
    """

    def __init__(self, layer_norms: str = 'exact', rotate: str | None = None):
        self.options = dict(layer_norms=layer_norms, rotate=rotate)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        self.meta = checkpoint.get('meta', {})

    def before_test(self, runner) -> None:
        model = unwrapped_model(runner)
        model.eval()
        self.report = fuse_norms(model, **self.options)
        runner.logger.info(f'fuse_norms: {self.report}')
