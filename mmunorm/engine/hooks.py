"""What the training loop does for the norms."""
from __future__ import annotations

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ..norms import UN


@HOOKS.register_module()
class UNWarmupHook(Hook):
    """Starts UN's warm-up with the run, and warns of a run that ends before its warm-up does.

    Weights that come from another task bring that task's step count and gradient statistics along; a run
    that does not resume begins at step 1 again and keeps `running_var`. A resumed run goes on unchanged.
    """

    def before_train(self, runner) -> None:
        norms = [module for module in runner.model.modules() if isinstance(module, UN)]
        if not norms:
            return
        if runner.iter == 0:
            for norm in norms:
                norm.restart_warmup()
        longest = max(norm.warmup_iters for norm in norms)
        if runner.max_iters <= longest:
            runner.logger.warning(
                f'UN never leaves its warm-up in this run: {runner.max_iters} training steps against '
                f'warmup_iters={longest}, so that neither its averages nor its outlier filter are used. '
                f'Set a shorter one in norm_cfg, for example warmup_iters={max(1, runner.max_iters // 10)}.')
