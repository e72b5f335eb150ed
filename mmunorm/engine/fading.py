"""Fine-tunes a LayerNorm checkpoint into offline norms: one norm after the other fades."""
from __future__ import annotations

import math

import torch
from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ..compat import sees_attributes
from ..conversion.fading import FadingNorm, drop_faded, fading_order
from ..errors import PreflightError
from ..norms.base import check_count
from .runner import unwrapped_model

_INFO = 'fading'  # the name in mmengine's message hub, which is saved in checkpoints
MEMORY = 0.98


@HOOKS.register_module()
class FadingHook(Hook):
    """Turns LayerNorms into offline norms during a run, one after the other.

    The norms of the model are of type FadingUN, FadingMABN, FadingTokenBN or FadingRepBN, and the run starts from
    weights of a model with LayerNorm. For the first `hold` of the steps the model computes exactly that. Then each
    norm in turn fades by a cosine, all in equal time, in the order of
    :func:`mmunorm.conversion.fading.fading_order`. In the last `static` of the steps no LayerNorm is left. Each norm
    begins as the nearest map to its LayerNorm on the tokens of the `measured` steps before its fade.

    As long as the loss explodes, fading waits: a step whose loss is not finite, or more than `factor` times its
    moving average, does not count. So fading may end later, and the hook warns if the run ends before it. It reads
    the loss at every step, which waits for the device. In a distributed run, the mean over the processes decides.

    In checkpoints, a norm that has faded is the plain offline norm: when all have, the checkpoint loads into a model
    with `norm_cfg=dict(type='UN')`. A resumed run goes on exactly.

    Args:
        hold (float): share of the steps before the first fade. Defaults to 0.05.
        static (float): share of the steps after the last one. Defaults to 0.35.
        measured (int): steps that a norm is fitted on. Defaults to 8.
        factor (float): a loss above this many times its average explodes. Defaults to 2.

    Raises:
        ValueError: an argument is out of its range.
        PreflightError: the model has no norm that can fade, the weights are those of another norm, the run is too
            short, or this torch cannot compile such a model.
    """
    # Before EMAHook, whose model then knows how far each norm has faded.
    priority = 'HIGH'

    def __init__(self, hold: float = 0.05, static: float = 0.35, measured: int = 8, factor: float = 2.):
        if hold < 0 or static < 0 or hold + static >= 1:
            raise ValueError('hold and static must not be negative, and less than 1 together, '
                             f'got hold={hold!r}, static={static!r}')
        if not factor > 1:
            raise ValueError(f'factor must be more than 1, got {factor!r}')
        self.hold = hold
        self.static = static
        self.measured = check_count('measured', measured, least=1)
        self.factor = factor

    def before_run(self, runner) -> None:
        runner.register_hook(_PlainCheckpoints())

    def before_train(self, runner) -> None:
        model = unwrapped_model(runner)
        norms = {name: module for name, module in model.named_modules() if isinstance(module, FadingNorm)}
        if not norms:
            raise PreflightError('FadingHook: the model has no norm that fades; set norm_cfg=dict(type=\'FadingUN\').')
        if runner.cfg.get('compile') and not sees_attributes():
            raise PreflightError(f'FadingHook: torch {torch.__version__} does not notice that a norm of a compiled '
                                 'model fades; leave `compile` out, or take torch 2.4.')
        self._norms = [norms[name] for name in fading_order(list(norms))]
        resumed = runner.iter > 0
        if not resumed and (faded := [name for name, norm in norms.items() if norm.has_faded]):
            raise PreflightError(
                f'FadingHook: {faded[0]} was loaded from a model without LayerNorm, from which nothing can fade. Start '
                'from a LayerNorm checkpoint, or train the converted one as it is, with the plain norm_cfg.')
        # Steps that count for fading, and the moving average of the loss with its weight.
        self._clock, self._loss, self._weight = 0, 0., 0.
        if resumed:
            self._clock, self._loss, self._weight = runner.message_hub.get_info(_INFO)
        self._schedule(runner.max_iters)
        self._set()

    def _schedule(self, steps: int) -> None:
        """When the fade of each norm begins, and how long it takes."""
        span = (1 - self.hold - self.static) * steps
        self._length = int(span / len(self._norms))
        if self._length < 1:
            raise PreflightError(f'FadingHook: {len(self._norms)} norms cannot fade one after the other in '
                                 f'{span:.0f} steps, of {steps}; train longer, or set smaller hold and static.')
        first = max(1, round(self.hold * steps))
        self._begins = [first + i * self._length for i in range(len(self._norms))]

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        for norm, begin in zip(self._norms, self._begins, strict=True):
            norm.measures = begin - self.measured < self._clock <= begin

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        for norm in self._norms:
            norm.measures = False
        self._clock += not self._explodes(outputs['loss'])
        self._set()  # now, for a checkpoint or a validation after this step
        runner.message_hub.update_info(_INFO, [self._clock, self._loss, self._weight])

    def _set(self) -> None:
        for norm, begin in zip(self._norms, self._begins, strict=True):
            done = min(max(0, self._clock - begin), self._length)
            if done and not norm.has_begun:
                norm.refit()
            norm.set_fade(done, self._length)

    def _explodes(self, loss: torch.Tensor) -> bool:
        """Whether a step's loss is far above its average, which it then joins as `factor` times the average."""
        loss = loss.detach().double().clone()
        all_reduce(loss, op='mean')
        loss = loss.item()
        average = self._loss / self._weight if self._weight else loss
        if math.isfinite(loss):
            self._loss = MEMORY * self._loss + (1 - MEMORY) * min(loss, self.factor * average)
            self._weight = MEMORY * self._weight + (1 - MEMORY)
        return not (math.isfinite(loss) and loss <= self.factor * average)

    def after_train(self, runner) -> None:
        left = [norm for norm in self._norms if not norm.has_faded]
        if left:
            runner.logger.warning(
                f'FadingHook: {len(left)} of {len(self._norms)} norms are still LayerNorm in part, because the loss '
                f'exploded in {runner.iter - self._clock} steps. Train longer, slower, or keep some norms.')


class _PlainCheckpoints(Hook):
    """Leaves in checkpoints of norms that have faded the offline norm alone."""
    priority = 'LOW'  # after EMAHook, which exchanges entries of the same names

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        for name in ('state_dict', 'ema_state_dict'):
            if name in checkpoint:
                drop_faded(checkpoint[name])
