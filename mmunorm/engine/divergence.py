"""Stops a run that has diverged, while its last good checkpoint is still there."""
from __future__ import annotations

import json
import math
import os
import shutil
import statistics
from functools import partial
from pathlib import Path

import torch
from mmengine.dist import all_reduce, broadcast_object_list, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import Tensor, nn

from ..compat import in_backward_pass, is_compiling
from ..errors import RunError
from ..files import whole_file, write_text
from ..norms import UN, OfflineNorm
from ..norms.algorithm import Step
from ..norms.base import check_count
from ..norms.kernels import statistics_dtype
from ..norms.layers import input_of, is_norm
from .runner import saves_after_this_step, unwrapped_model

RECORD = 'divergence.json'
LAST_GOOD = 'last_good.pth'

# What is watched in each norm layer.
WATCHED = OUTPUT, SQUARE, GRADIENT = range(3)
# A larger output counts as infinite. An output that is estimated is a root mean square. A single value may be
# larger than that, by a factor of up to the square root of the number of tokens.
LARGEST_OUTPUT = 1e35


class DivergenceError(RunError):
    """The run has diverged; the message says when, in which layer, and what to change."""


@HOOKS.register_module()
class DivergenceHook(Hook):
    """Stops a run whose loss, activations or norm statistics are no longer finite; `tools/train.py` adds it.

    A step is bad if one of these holds:

    - The loss is not finite.
    - `factor` is given, and the loss exceeds `factor` times the starting loss. The starting loss is the median
      loss of the first `patience` good steps.
    - The output of a norm layer is not finite, or is beyond 1e35.
    - The input of a norm layer is infinite, or too large to be squared. The mean square `s`, or the variance, is
      then not finite. The norm itself goes on with its running statistics.
    - The `weight` of a norm layer has a gradient `sum(dy * z)` that is not finite. Then `g` is not finite either.
      With a loss scale this happens now and then and does no harm: the optimizer skips the step.

    The hook stops the run with a :class:`DivergenceError` after `patience` bad steps in a row. It also does so if
    the run ends in bad steps that the weights do not recover from. `divergence.json` in the work directory then has

    - `step` (int): the first bad step, counted from 1;
    - `loss` and `start_loss` (float or None): the loss of that step, and the starting loss;
    - `layer` (str or None): the norm layer that went wrong first at that step, see below;
    - `checkpoint` (str or None): the last checkpoint that is known to be good, because a good step came after it.
      A checkpoint that was saved after the update that broke the weights is not good;
    - `message` (str): all of this in words, with advice.

    `layer` is the first norm layer, in the order of execution, whose output or square is not finite. If there is
    none and the loss is finite, it is the first layer of the backward pass whose gradient is not finite. Otherwise
    it is the layer whose largest output has grown most since the last good step.

    During training, the last good checkpoint has a second name (a hard link), `last_good.pth`. So it survives the
    next save for any value of `max_keep_ckpts`. If the file system has no links, the hook copies the checkpoint at
    the first bad step. A run that ends well removes `last_good.pth`.

    In a distributed run, the mean over the processes decides. A model is not watched if its `train_step` returns no
    `loss`. In a compiled model (`torch.compile`), only the loss and the gradients are watched.

    The hook reads the input and the output of a norm layer once each. For an offline norm (UN and its family), it
    reads the measured statistics instead, and the output only if it is float16. It does not do so for PN with
    `layer_scale`, for PRepBN, and for calls with a `pad_mask`. The largest value of an output that is not read is
    estimated: the largest root mean square of a channel, `sqrt(weight^2 * s / (var_hat + eps) + bias^2)`.

    Args:
        patience (int): number of bad steps in a row that ends the run. Defaults to 10.
        factor (float, optional): a loss above this many times the starting loss makes a step bad. Defaults to
            None: any finite loss is accepted.
        interval (int): steps between two looks at what was recorded. Each look waits for the device once.
            Defaults to 10.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, patience: int = 10, factor: float | None = None, interval: int = 10):
        for name, value in (('patience', patience), ('interval', interval)):
            check_count(name, value, least=1)
        if factor is not None and not factor > 1:
            raise ValueError(f'factor must be more than 1, got {factor!r}')
        self.patience = patience
        self.factor = factor
        self.interval = interval

    def before_train(self, runner) -> None:
        if is_main_process():
            Path(runner.work_dir, RECORD).unlink(missing_ok=True)
        self._first_losses = list(_info(runner, 'divergence_first_losses', []))
        self._peaks: dict[tuple[int, str], Tensor] = {}  # of the current step
        self._steps: dict[str, Step | None] = {}  # the last step of each offline norm that was looked at
        self._rows: list[Tensor] = []  # loss and peaks of the steps since the last look
        self._saved: list[str | None] = []  # the newest checkpoint before each of these steps
        self._good: list[float] | None = None  # the row of the last good step
        self._bad: list[float] | None = None  # the row of the first step in the current series of bad steps
        self._bad_steps = 0
        self._is_lost = False  # whether that series has a step from which the weights do not recover
        self._confirmed: str | None = None  # the last checkpoint with a good step after it
        self._is_kept = False  # whether LAST_GOOD belongs to this run
        self._order: dict[str, int] = {}
        self._handles = []
        self._names = []
        for name, module in unwrapped_model(runner).named_modules():
            if is_norm(module):
                self._names.append(name)
                # Must run before FSDP's own hook, which may take a norm's weights away.
                self._handles.append(
                    module.register_forward_hook(partial(self._watch, name), prepend=True, with_kwargs=True))
                weight = getattr(module, 'weight', None)
                if isinstance(weight, Tensor) and weight.requires_grad:
                    self._handles.append(weight.register_hook(partial(self._watch_gradient, name)))

    def _watch(self, name: str, module: nn.Module, args, kwargs, output) -> None:
        # A compiled graph cannot hold this look. A recomputed forward pass has been looked at before.
        if is_compiling() or in_backward_pass():
            return
        if not (module.training and isinstance(output, Tensor) and output.numel()):
            return
        self._order.setdefault(name, len(self._order))
        x, pad_mask = input_of(args, kwargs)
        with torch.no_grad():
            step = self._new_step(name, module, pad_mask)
            if step is None:
                size, square = _largest(output), _largest_square(x)
            else:
                square = _mean_square(step)
                # In float16 an output overflows long before any statistic does.
                size = (_largest(output) if output.dtype == torch.float16 else
                        _output_size(module, step, square))
                square = square.amax()
            self._note(OUTPUT, name, size)
            self._note(SQUARE, name, square)

    def _new_step(self, name: str, module: nn.Module, pad_mask: Tensor | None) -> Step | None:
        """The step that an offline norm recorded for this forward pass; None if it does not cover all tokens."""
        if not isinstance(module, OfflineNorm):
            return None
        step, before = module.newest_step, self._steps.get(name)
        self._steps[name] = step
        return None if step is before or pad_mask is not None else step

    def _watch_gradient(self, name: str, gradient: Tensor) -> None:
        with torch.no_grad():
            self._note(GRADIENT, name, torch.linalg.vector_norm(gradient, torch.inf))

    def _note(self, what: int, name: str, peak: Tensor) -> None:
        peak, key = peak.float(), (what, name)
        self._peaks[key] = torch.maximum(self._peaks[key], peak) if key in self._peaks else peak

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        peaks, self._peaks = self._peaks, {}
        if not isinstance(outputs, dict) or 'loss' not in outputs:
            return
        loss = outputs['loss'].detach().float()
        absent = loss.new_zeros(())
        self._rows.append(torch.stack([loss, *(peaks.get((what, name), absent) for what in WATCHED
                                               for name in self._names)]))
        self._saved.append(_info(runner, 'last_ckpt'))
        if len(self._rows) >= self.interval or saves_after_this_step(runner):
            self._look(runner)

    def after_train_epoch(self, runner) -> None:
        # `runner.iter` counts the epoch's last step by now.
        self._look(runner, last_step=runner.iter)

    def after_train(self, runner) -> None:
        for handle in self._handles:
            handle.remove()
        if self._bad_steps and self._is_lost:  # the run has ended before `patience` steps were bad
            self._stop(runner, runner.iter - self._bad_steps + 1)
        if self._is_kept and not self._bad_steps:
            Path(runner.work_dir, LAST_GOOD).unlink(missing_ok=True)

    def _look(self, runner, last_step: int | None = None) -> None:
        if not self._rows:
            return
        rows = torch.stack(self._rows)
        saved, self._rows, self._saved = self._saved, [], []
        all_reduce(rows, op='mean')
        outputs = rows[:, 1 + OUTPUT * len(self._names):1 + (OUTPUT + 1) * len(self._names)]
        outputs.masked_fill_(outputs > LARGEST_OUTPUT, math.inf)
        last_step = runner.iter + 1 if last_step is None else last_step
        first_step = last_step - len(rows) + 1
        for step, (row, checkpoint) in enumerate(zip(rows.tolist(), saved, strict=True), start=first_step):
            if not self._is_bad(row, runner):
                self._good = row
                self._bad_steps = 0
                self._is_lost = False
                if checkpoint != self._confirmed:
                    self._confirm(runner, checkpoint)
                continue
            if self._bad_steps == 0:
                self._bad = row
                self._copy_last_good(runner)
            self._bad_steps += 1
            # With a loss scale, the optimizer skips a step whose gradient has overflowed.
            scaled = getattr(runner.optim_wrapper, 'loss_scaler', None) is not None
            harmful = row[:1 + GRADIENT * len(self._names)] if scaled else row
            self._is_lost |= not all(map(math.isfinite, harmful))
            if self._bad_steps == self.patience:
                self._stop(runner, step - self.patience + 1)

    def _is_bad(self, row: list[float], runner) -> bool:
        if not all(map(math.isfinite, row)) or self._exploded(row[0]):
            return True
        if len(self._first_losses) < self.patience:
            self._first_losses.append(row[0])
            runner.message_hub.update_info('divergence_first_losses', self._first_losses)
        return False

    def _exploded(self, loss: float) -> bool:
        start = self._start_loss()
        return self.factor is not None and start is not None and loss > self.factor * start

    def _start_loss(self) -> float | None:
        return statistics.median(self._first_losses) if self._first_losses else None

    def _confirm(self, runner, checkpoint: str) -> None:
        """Notes that a checkpoint is good, and gives it a second name before CheckpointHook can remove it."""
        self._confirmed = checkpoint
        if not is_main_process() or not os.path.isfile(checkpoint):
            return
        kept = Path(runner.work_dir, LAST_GOOD)
        kept.unlink(missing_ok=True)
        try:
            os.link(checkpoint, kept)
        except OSError:  # a file system without hard links
            self._is_kept = False
        else:
            self._is_kept = True

    def _copy_last_good(self, runner) -> None:
        if is_main_process() and not self._is_kept and self._confirmed and os.path.isfile(self._confirmed):
            with whole_file(Path(runner.work_dir, LAST_GOOD)) as part:
                shutil.copyfile(self._confirmed, part)
            self._is_kept = True

    def _stop(self, runner, step: int) -> None:
        message = [None]
        if is_main_process():  # only this process knows which files exist
            message = [self._report(runner, step)]
        broadcast_object_list(message)
        runner.logger.error(message[0])
        raise DivergenceError(message[0])

    def _report(self, runner, step: int) -> str:
        """Writes RECORD and returns the message."""
        loss, start = self._bad[0], self._start_loss()
        layer, trouble = self._layer()
        checkpoint = self._last_good(runner)
        what = f'the loss is {loss:.4g}'
        if math.isfinite(loss) and self._exploded(loss):
            what += f', more than {self.factor:g} times the {start:.4g} of the start'
        message = (f'the run diverged at step {step}: {what}; {trouble}. {self._bad_steps} steps in a row '
                   f'were like that. ' + (f'The last good checkpoint is {checkpoint}. ' if checkpoint else
                                     'No checkpoint before it is known to be good. ') + _advice(runner))
        record = dict(step=step, loss=_finite(loss), start_loss=_finite(start), layer=layer,
                      checkpoint=checkpoint, message=message)
        write_text(Path(runner.work_dir, RECORD), json.dumps(record, indent=1))
        return message

    def _last_good(self, runner) -> str | None:
        if self._confirmed is None:
            return None
        kept = Path(runner.work_dir, LAST_GOOD)
        if kept.exists():  # in a resumed run it may be the only name of the checkpoint
            return str(kept)
        # A remote checkpoint has no second name. A folder, which sharded training writes, has none either.
        is_there = '://' in self._confirmed or os.path.exists(self._confirmed)
        return self._confirmed if is_there else None

    def _layer(self) -> tuple[str | None, str]:
        """The layer to blame at the first bad step, and what is wrong with it."""
        peaks = self._by_layer(self._bad)
        names = sorted(self._names, key=lambda name: self._order.get(name, len(self._order)))
        for name in names:
            # For an offline norm, the square tells two cases apart: infinity means a large input, NaN means NaN.
            if math.isinf(peaks[name][SQUARE]):
                return name, f'the first norm layer whose input is too large for its statistics is {name}'
            if not all(map(math.isfinite, peaks[name][:GRADIENT])):
                return name, f'the first norm layer with a non-finite output is {name}'
        if math.isfinite(self._bad[0]):  # after a non-finite loss, the gradients of all layers are non-finite
            for name in reversed(names):
                if not math.isfinite(peaks[name][GRADIENT]):
                    return name, ('the first norm layer with a non-finite gradient, in the order of the '
                                  f'backward pass, is {name}')
        if self._good is None or not names:
            return None, 'the outputs of all norm layers are finite'
        before = self._by_layer(self._good)
        name, growth = max(((name, peaks[name][OUTPUT] / before[name][OUTPUT]) for name in names
                            if before[name][OUTPUT] > 0), key=lambda item: item[1], default=(None, 1))
        if growth <= 1:
            return None, 'the outputs of all norm layers are finite and have not grown'
        return name, f'the output of {name} has grown most, {growth:.3g} times since the last good step'

    def _by_layer(self, row: list[float]) -> dict[str, tuple[float, float, float]]:
        """A row's peaks by layer: OUTPUT, SQUARE and GRADIENT."""
        count = len(self._names)
        parts = (row[1 + what * count:1 + (what + 1) * count] for what in WATCHED)
        return dict(zip(self._names, zip(*parts, strict=True), strict=True))


def _largest(values: Tensor) -> Tensor:
    values = values.detach()
    if not values.is_cpu:
        return torch.linalg.vector_norm(values, torch.inf)
    values = values.float() if values.dtype == torch.float16 else values  # older releases have no aminmax of it
    least, greatest = values.aminmax()  # on a CPU a dozen times faster
    return torch.maximum(greatest, -least)


def _largest_square(values: Tensor) -> Tensor:
    largest = _largest(values)
    return largest.to(statistics_dtype(largest.dtype)).square()


def _mean_square(step: Step) -> Tensor:
    """The mean square of an offline norm's input, `(C,)` or `(1, C)`; not finite where a square is not."""
    if step.mean is None:
        return step.measured
    variance, mean = step.measured
    return variance + mean.square()


def _output_size(norm: OfflineNorm, step: Step, square: Tensor) -> Tensor:
    """Estimates the largest root mean square of a channel of an offline norm's output, from its statistics.

    `square` is the mean square of the input. The norm subtracts a mean, or 0. The estimate is exact where that is
    the mean of the input. Otherwise, without `eta`, the true value is at most sqrt(2) times the estimate.
    """
    deviation = square
    if step.mean is not None:  # this mean is over all ranks
        deviation = step.measured[0] + (step.measured[1] - step.mean).square()
    size = torch.hypot(norm.weight * (deviation / (step.var_hat + norm.eps)).sqrt(), norm.bias)
    if norm.eta is not None:
        size = size + norm.eta.abs() * square.sqrt()
    return size.amax()


def _info(runner, key: str, default=None):
    hub = runner.message_hub
    return hub.get_info(key) if key in hub.runtime_info else default


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None  # JSON has no NaN


def _advice(runner) -> str:
    """Advice on what to change; the most likely help comes first."""
    wrapper = runner.optim_wrapper
    advice = []
    norms = [module for module in runner.model.modules() if isinstance(module, OfflineNorm)]
    if any(isinstance(norm, UN) and not norm.outlier_filter for norm in norms):  # no other method has one
        advice.append('turn the outlier filter on (norm_cfg=dict(outlier_filter=True))')
    if type(wrapper).__name__ == 'AmpOptimWrapper':
        advice.append('train without --amp, or with dtype bfloat16, to see whether float16 overflows')
    if not getattr(wrapper, 'clip_grad_kwargs', None):
        advice.append('clip gradients (optim_wrapper=dict(clip_grad=dict(max_norm=5.0)))')
    advice.append('lower the learning rate or lengthen its warm-up')
    if any(norm.warmup_iters is not None for norm in norms):
        advice.append('raise warmup_iters in norm_cfg, so that averaging starts later')
    return f'Things to change, one at a time: {"; ".join(advice)}.'
