"""Schemes that normalize the stream after each sum."""
from __future__ import annotations

import warnings

import torch

from mmunorm.norms.base import check_choice, check_count

from .base import RESIDUALS, Residual, Scale, StackPosition
from .clock import SCHEDULES, branch_weight
from .sublayer import OUTER_ROLES, ROLES


@RESIDUALS.register_module()
class PostNorm(Residual):
    """`x' = LN(x + F(x))`, of the first Transformer (arXiv 1706.03762), with Xavier's initial weights.

    The stream needs no norm after the last layer.
    """
    norm_at = 'post'
    final_norm = False
    gains = {}


@RESIDUALS.register_module()
class DSInit(PostNorm):
    """DS-Init (arXiv 1908.11365): PostNorm; the weights of layer l, from 1, start as Xavier's times `l^(-1/2)`."""

    def __init__(self, position: StackPosition):
        super().__init__(position)
        self.gains = dict.fromkeys(ROLES, position.layer**-0.5)


@RESIDUALS.register_module()
class DeepNorm(PostNorm):
    """DeepNorm (arXiv 2203.00555): `x' = LN(a x + F(x))`, a heavier stream and lighter weights.

    Those of v, out, fc1 and fc2 start as Xavier's times b, those of q and k as Xavier's. For one stack of N layers
    `a = (2 N)^(1/4)` and `b = (8 N)^(-1/4)`. With N layers in an encoder and M in a decoder `a = 0.81 (N^4 M)^(1/16)`
    and `b = 0.87 (N^4 M)^(-1/16)` in the encoder, `a = (3 M)^(1/4)` and `b = (12 M)^(-1/4)` in the decoder.
    """

    def __init__(self, position: StackPosition):
        super().__init__(position)
        if position.stacks is None:
            self.alpha, beta = (2 * position.depth)**0.25, (8 * position.depth)**-0.25
        else:
            n, m = position.stacks
            if position.in_decoder:
                self.alpha, beta = (3 * m)**0.25, (12 * m)**-0.25
            else:
                self.alpha, beta = 0.81 * (n**4 * m)**0.0625, 0.87 * (n**4 * m)**-0.0625
        self.gains = dict.fromkeys(OUTER_ROLES, beta)

    def scales(self) -> tuple[Scale, Scale]:
        return self.alpha, None


@RESIDUALS.register_module()
class BranchNorm(DeepNorm):
    """BranchNorm (arXiv 2305.02790): `x' = LN(x + a_t F(x))` with `a_t = min(1, t / T)` (Eq. 8).

    t is the number of optimizer updates so far, the one buffer `update_clock.updates` of the model. At t = 0 the
    gradient of F's parameters is exactly 0; from t = T on the scheme equals PostNorm bit by bit. Evaluation uses the
    same `a_t`. `ResidualHook` counts in mmengine's Runner, :func:`count_updates` elsewhere. Fine-tuning continues from
    the checkpoint's t. Weights start as DeepNorm's.

    Args:
        warmup_iters (int): T, the updates until the branch has its full weight. 0 is PostNorm. Defaults to 4000,
            the paper's; 100 to 20000 work there.
        schedule (str): 'linear', or a formula of ours for another shape of the paper's Fig. 7, 'exponential' or
            'sigmoid'; see :func:`branch_weight`. Defaults to 'linear'.
    """
    needs_clock = True

    def __init__(self, position: StackPosition, warmup_iters: int = 4000, schedule: str = 'linear'):
        super().__init__(position)
        self.warmup_iters = check_count('warmup_iters', warmup_iters, minimum=0)
        self.schedule = check_choice('schedule', schedule, SCHEDULES)
        # In a tuple, so that it is no child: the model has one clock, and saves it once.
        self._clock = (position.clock, )

    def scales(self) -> tuple[Scale, Scale]:
        """As :meth:`Residual.scales`; warns of training in which t is not counted."""
        clock, = self._clock
        if self.training and not clock.is_counted and self.warmup_iters > 0 and torch.is_grad_enabled():
            warnings.warn(
                'BranchNorm trains, and the updates that its branches depend on are not counted: add '
                "dict(type='ResidualHook') to custom_hooks, or call projects.deep.deep.count_updates(model, "
                'optimizer).',
                stacklevel=2)
        return None, branch_weight(clock.updates, self.warmup_iters, self.schedule)

    def extra_repr(self) -> str:
        return f'warmup_iters={self.warmup_iters}, schedule={self.schedule!r}'
