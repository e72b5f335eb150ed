"""What the training loop does for the norms."""
from __future__ import annotations

from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS

from ..norms import OfflineNorm, PRepBN


@HOOKS.register_module()
class UNWarmupHook(Hook):
    """Starts the warm-up of UN, MABN and PN with the run, and warns of a run that ends before it does.

    Weights that come from another task bring that task's step count and gradient statistics along; a run
    that does not resume begins at step 1 again and keeps `running_var`. A resumed run goes on unchanged.
    PRepBN has no warm-up and goes on from its own step count; the hook warns when lambda will not reach 0.
    """

    def before_train(self, runner) -> None:
        modules = list(runner.model.modules())
        norms = [module for module in modules
                 if isinstance(module, OfflineNorm) and module.warmup_iters is not None]
        if runner.iter == 0:
            for norm in norms:
                norm.restart_warmup()
        longest = max(norms, key=lambda norm: norm.warmup_iters, default=None)
        if longest is not None and runner.max_iters <= longest.warmup_iters:
            runner.logger.warning(
                f'{type(longest).__name__} never leaves its warm-up in this run: {runner.max_iters} training '
                f'steps against warmup_iters={longest.warmup_iters}, so that none of its averages are used. '
                f'Set a shorter one in norm_cfg, for example warmup_iters={max(1, runner.max_iters // 10)}.')

        left = max((norm.steps - norm.num_batches_tracked.item() for norm in modules
                    if isinstance(norm, PRepBN)), default=0)
        if left > runner.max_iters - runner.iter:
            runner.logger.warning(
                f'PRepBN still blends LayerNorm in when this run ends, and cannot be folded then: it needs '
                f'{left} more training steps, and the run has {runner.max_iters - runner.iter}. Set '
                'fewer steps in norm_cfg.')


def saves_after_this_step(runner) -> bool:
    """Whether a checkpoint that counts steps is saved after this step; to be asked in `after_train_iter`."""
    return any(isinstance(hook, CheckpointHook) and not hook.by_epoch
               and (hook.every_n_train_iters(runner, hook.interval, hook.save_begin)
                    or (hook.save_last and hook.is_last_train_iter(runner)))
               for hook in runner.hooks)
