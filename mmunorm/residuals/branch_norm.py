"""BranchNorm (Liu et al., arXiv 2305.02790): the branch grows from nothing to all of PostNorm's."""
from __future__ import annotations

import warnings

import torch

from ..norms.base import check_choice, check_count
from .base import RESIDUALS, Scale, StackPosition
from .clock import SCHEDULES, growth
from .post_norm import DeepNorm


@RESIDUALS.register_module()
class BranchNorm(DeepNorm):
    """`x' = LN(x + a_t F(x))` with `a_t = min(1, t / T)` (Eq. 8); from t = T on it is PostNorm to the last bit.

    t is the number of optimizer updates so far, the one buffer `update_clock.updates` of the model. Evaluation uses
    the same `a_t`. :class:`mmunorm.engine.ResidualHook` counts in mmengine's Runner,
    :func:`mmunorm.residuals.count_updates` elsewhere. Fine-tuning goes on from the checkpoint's t. Weights start as
    DeepNorm's. At t = 0 the gradient of F's parameters is exactly 0.

    Args:
        warmup_iters (int): T, the updates until the branch has its whole weight. 0 is PostNorm. Defaults to 4000,
            the paper's; 100 to 20000 work there.
        schedule (str): 'linear', or a formula of ours for another shape of the paper's Fig. 7, 'exponential' or
            'sigmoid'; see :func:`mmunorm.residuals.growth`. Defaults to 'linear'.

    Raises:
        ValueError: an argument is out of its range.
    """
    needs_clock = True

    def __init__(self, position: StackPosition, warmup_iters: int = 4000, schedule: str = 'linear'):
        super().__init__(position)
        self.warmup_iters = check_count('warmup_iters', warmup_iters, least=0)
        self.schedule = check_choice('schedule', schedule, SCHEDULES)
        # In a tuple, so that it is no child: the model has one clock, and saves it once.
        self._clock = (position.clock, )

    def scales(self) -> tuple[Scale, Scale]:
        """As :meth:`Residual.scales`; warns of training in which t stands still."""
        clock, = self._clock
        if self.training and not clock.is_counted and self.warmup_iters > 0 and torch.is_grad_enabled():
            warnings.warn(
                'BranchNorm trains, and nobody counts the updates that its branches grow by: add '
                "dict(type='ResidualHook') to custom_hooks, or call mmunorm.residuals.count_updates(model, optimizer).",
                stacklevel=2)
        return None, growth(clock.updates, self.warmup_iters, self.schedule)

    def extra_repr(self) -> str:
        return f'warmup_iters={self.warmup_iters}, schedule={self.schedule!r}'
