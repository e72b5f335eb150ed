"""The learning rate of the Transformer (arXiv 1706.03762)."""
from mmengine.optim.scheduler import _ParamScheduler
from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.registry import PARAM_SCHEDULERS

from mmunorm.norms.base import check_count


@PARAM_SCHEDULERS.register_module()
class InverseSquareRoot(LRSchedulerMixin, _ParamScheduler):
    """`lr * min(t / warmup, sqrt(warmup / t))` at step t, from 1: the optimizer's `lr` is the highest value.

    It cannot be combined with another learning rate scheduler.

    Args:
        optimizer (Optimizer | BaseOptimWrapper): the optimizer.
        warmup (int): number of warm-up steps; a ValueError if less than 1.
        **kwargs: `begin`, `end`, `last_step`, `by_epoch` and `verbose` of mmengine's schedulers. Steps are training
            steps with `by_epoch=False`, else epochs.
    """

    def __init__(self, optimizer, *, warmup: int, **kwargs):
        self.warmup = check_count('warmup', warmup, minimum=1)
        super().__init__(optimizer, **kwargs)

    def _get_value(self) -> list[float]:
        step = self.last_step + 1
        factor = min(step / self.warmup, (self.warmup / step)**0.5)
        return [value * factor for value in self.base_values]
