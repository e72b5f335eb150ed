"""Records the statistics of norm layers while a model trains."""
from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmunorm.compat import in_backward_pass
from mmunorm.engine.runner import unwrapped_model
from mmunorm.norms import OfflineNorm
from mmunorm.norms.base import check_count
from mmunorm.norms.kernels.reference import second_moment, statistics_dtype, variance_and_mean
from mmunorm.norms.layers import channel_axis, input_of, norm_layers
from mmunorm.utils import PreflightError

from .norm_record import (
    FOLDER,
    OFFLINE_GRADIENT,
    ONLINE_GRADIENT,
    NormRecordWriter,
    RecordedNorm,
    RecordError,
    row_dtypes,
)
from .normality import MIN_STEPS, pnac
from .prep_bn import PRepBN

# The maximum number of steps buffered in memory, on the GPU if the model is there.
BLOCK_STEPS = 100
BLOCK_BYTES = 16 * 2**20


@HOOKS.register_module()
class NormStatisticsHook(Hook):
    """Records activation and gradient statistics of norm layers into a folder of the work directory.

    For each recorded step and layer, the folder has

    - the mean square of the input over all tokens, per channel (the paper's `s`);
    - for a norm with running statistics, the gradient statistic `g = mean(gamma * dy * z)` (Eq. 6-9); for another
      norm, and for PRepBN, which blends LayerNorm in, the mean square of the gradient at its output;
    - the outlier steps so far, and periodically the running variances and the means of the inputs.

    The statistics are those of the single step, before the norm averages or filters them, from the first process of a
    distributed run. :class:`.norm_record.NormRecord` reads them. Gradients are divided by the loss scale of mixed
    precision, but not multiplied by the number of gradient accumulation steps. The gradient of a frozen layer is NaN,
    and so are all values of a layer that did not run. If a layer runs several times in a step, all tokens are included,
    except those that a `pad_mask` marks; gradients of such tokens are included. With activation checkpointing, the
    first of the two forward passes is recorded.

    Up to 100 steps and 16 MiB are buffered in memory. They are written together, and before every checkpoint, so a
    resumed run has no gap. `tools/train.py` also writes them if an error or Ctrl-C ends the run. On each write, the
    visualizer gets values of the last `span` recorded steps: `norm/outlier_share`, the share of outlier steps, and
    `norm/pnac_activation` and `norm/pnac_gradient`, the mean PNAC of all layers.

    Args:
        interval (int): record every n-th step. Defaults to 1.
        layers (Sequence[str], optional): regular expressions. A norm is recorded if one of them is found in its
            name. Defaults to None: all norms.
        span (int): the number of recorded steps of the visualizer's values, at least 20. Defaults to 100.

    Raises:
        ValueError: an argument is out of range.
        PreflightError: when training begins: no norm has such a name, or the record of a resumed run has other layers
            or another `interval`.
    """

    def __init__(self, interval: int = 1, layers: Sequence[str] | None = None, span: int = 100):
        self.interval = check_count('interval', interval, minimum=1)
        self.span = check_count('span', span, minimum=MIN_STEPS)
        if layers is not None and (isinstance(layers, str) or not layers):
            raise ValueError('layers must be a list of one regular expression or more, or None for all '
                             f'norms, got {layers!r}')
        self.patterns = layers
        self._taps: list[NormTap] = []

    def before_train(self, runner) -> None:
        if not is_main_process():
            return
        norms = self._choose(unwrapped_model(runner))
        layers = [RecordedNorm(name, type(norm).__name__, num_channels(norm), gradient_kind(norm))
                  for name, norm in norms.items()]
        config = getattr(runner.cfg, 'filename', None)
        info = dict(run=os.path.basename(os.path.normpath(runner.work_dir)),
                    config=os.path.basename(config) if config else None,
                    interval=self.interval, processes=get_world_size())
        try:
            self._writer = NormRecordWriter(Path(runner.work_dir, FOLDER), layers, info, runner.iter)
        except RecordError as error:
            raise PreflightError(f'NormStatisticsHook: {error}') from error
        self._filters = [getattr(norm, 'outlier_filter', False) for norm in norms.values()]
        ends = np.cumsum([0] + [layer.channels for layer in layers]).tolist()
        self._columns = [slice(*pair) for pair in zip(ends[:-1], ends[1:], strict=True)]
        size = max(1, min(BLOCK_STEPS, BLOCK_BYTES // (8 * ends[-1])))
        device = next((p.device for norm in norms.values() for p in norm.parameters()), torch.device('cpu'))
        self._block = torch.empty(size, 2, ends[-1], device=device)
        # Of the first step of a block: means and running variances.
        self._snapshot = torch.empty(2, ends[-1], device=device)
        self._outliers = torch.full((size, len(layers)), -1, device=device)
        self._steps: list[int] = []  # those that have ended
        self._recent = np.empty(0, row_dtypes(layers)[0])
        self._taps = [NormTap(norm, layer.gradient) for norm, layer in zip(norms.values(), layers, strict=True)]

    def _choose(self, model: nn.Module) -> dict[str, nn.Module]:
        norms = {name: norm for name, norm in norm_layers(model) if num_channels(norm) is not None}
        for pattern in self.patterns or ():
            if not any(re.search(pattern, name) for name in norms):
                raise PreflightError(f'NormStatisticsHook: layers: no norm has a name with {pattern!r} '
                                     f'in it; the model has {", ".join(norms) or "no norm"}.')
        if not norms:
            raise PreflightError('NormStatisticsHook: the model has no norm to record.')
        return {name: norm for name, norm in norms.items()
                if self.patterns is None or any(re.search(pattern, name) for pattern in self.patterns)}

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        if not self._taps or (runner.iter + 1) % self.interval:
            return
        self._loss_scale = loss_scale(runner)  # the step may change it
        row = len(self._steps)
        self._block[row].fill_(torch.nan)
        if row == 0:
            self._snapshot.fill_(torch.nan)
        for tap, columns in zip(self._taps, self._columns, strict=True):
            tap.open(*self._block[row][:, columns], self._snapshot[0, columns] if row == 0 else None)

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        if not self._taps or (runner.iter + 1) % self.interval:
            return
        row = len(self._steps)
        for tap, columns in zip(self._taps, self._columns, strict=True):
            tap.close(self._loss_scale)
            if row == 0 and getattr(tap.norm, 'running_var', None) is not None:
                self._snapshot[1, columns] = tap.norm.running_var.detach()
        if any(self._filters):
            counts = [tap.norm.num_outliers for tap, has in zip(self._taps, self._filters, strict=True) if has]
            self._outliers[row, self._filters] = torch.stack(counts)
        self._steps.append(runner.iter + 1)
        if len(self._steps) == len(self._block):
            self._write(runner)

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        self._write(runner)

    def after_train(self, runner) -> None:
        self.flush(runner)

    def flush(self, runner) -> None:
        """Writes the buffered steps, except an interrupted one, and stops recording."""
        self._write(runner)
        for tap in self._taps:
            tap.remove()
        self._taps = []

    def _write(self, runner) -> None:
        if not self._taps or not self._steps:
            return
        step_dtype, snapshot_dtype = row_dtypes(self._writer.layers)
        count = len(self._steps)
        rows, snapshot = np.empty(count, step_dtype), np.empty(1, snapshot_dtype)
        rows['step'] = self._steps
        rows['activation'], rows['gradient'] = self._block[:count].cpu().numpy().swapaxes(0, 1)
        rows['outliers'] = self._outliers[:count].cpu().numpy()
        snapshot['step'] = self._steps[0]
        snapshot['mean'], snapshot['running_var'] = self._snapshot.cpu().numpy()
        # Cleared before the write, so that `flush` does not write the steps again after an interruption.
        self._steps = []
        self._writer.append(rows, snapshot)
        self._publish(runner, rows)

    def _publish(self, runner, rows: np.ndarray) -> None:
        """Passes the values of the last `span` steps to the logger."""
        self._recent = np.concatenate([self._recent, rows])[-self.span:].copy()  # not a view of all
        if len(self._recent) < MIN_STEPS:
            return
        for field in ('activation', 'gradient'):
            percents = np.array([pnac(self._recent[field][:, columns]).percent for columns in self._columns])
            if np.isfinite(percents).any():
                runner.message_hub.update_scalar(f'train/norm/pnac_{field}', np.nanmean(percents))
        if any(self._filters):
            first, last = self._recent[0], self._recent[-1]
            share = (last['outliers'] - first['outliers'])[self._filters].mean() / (last['step'] - first['step'])
            runner.message_hub.update_scalar('train/norm/outlier_share', share)


def loss_scale(runner) -> float:
    """The factor of the loss in this step's backward pass; 1 without a gradient scaler. Waits for a GPU."""
    scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
    return scaler.get_scale() if hasattr(scaler, 'get_scale') else 1.


def gradient_kind(norm: nn.Module) -> str:
    """The gradient statistic that is recorded for a norm."""
    is_offline = isinstance(norm, (OfflineNorm, _BatchNorm)) and not isinstance(norm, PRepBN)
    return OFFLINE_GRADIENT if is_offline else ONLINE_GRADIENT


def num_channels(norm: nn.Module) -> int | None:
    """Channels of a norm; None for a LayerNorm over several dimensions."""
    shape = getattr(norm, 'normalized_shape', None)
    if shape is not None:
        return shape[0] if len(shape) == 1 else None
    return getattr(norm, 'num_channels', getattr(norm, 'num_features', None))


class NormTap:
    """Computes the statistics of one norm during a training step; `kind` is its :func:`gradient_kind`.

    For an offline norm `g` is free: the gradient of gamma, summed over tokens, is `sum(dy * z)`.
    """

    def __init__(self, norm: nn.Module, kind: str):
        self.norm = norm
        self.is_offline = kind == OFFLINE_GRADIENT
        self.gradient = None
        self.attach()

    def attach(self) -> None:
        """Registers the hooks."""
        self.handles = [self.norm.register_forward_hook(self._on_forward, with_kwargs=True)]
        weight = getattr(self.norm, 'weight', None)
        if self.is_offline and weight is not None and weight.requires_grad:
            self.handles.append(weight.register_hook(self._on_weight_gradient))

    def open(self, activation: Tensor, gradient: Tensor, mean: Tensor | None) -> None:
        """Begins a step, whose statistics go into these tensors `(C,)`."""
        self.activation, self.gradient, self.mean = activation, gradient, mean
        self.tokens = 0
        self.gradient_tokens = 0

    def close(self, loss_scale: float) -> None:
        """Ends the step, and divides by the loss scale. Calls before the next step are not recorded."""
        if loss_scale != 1:
            self.gradient.div_(loss_scale if self.is_offline else loss_scale**2)
        self.gradient = None

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self.handles:
            handle.remove()

    def _on_forward(self, norm, args, kwargs, output) -> None:
        if self.gradient is None:
            return
        axis = channel_axis(norm, kwargs)
        if not self.is_offline and output.requires_grad:
            target = self.gradient
            output.register_hook(lambda dy: self._on_output_gradient(target, dy.movedim(axis, -1)))
        if in_backward_pass():
            return  # the second forward of activation checkpointing
        x, pad_mask = input_of(args, kwargs)
        if x.numel() == 0:
            return
        valid = ~pad_mask if isinstance(pad_mask, Tensor) and pad_mask.dtype == torch.bool else None
        with torch.no_grad():
            x = x.detach().movedim(axis, -1)
            tokens = x.shape[:-1].numel() if valid is None else valid.sum()
            _average(self.activation, second_moment(x, valid), self.tokens, tokens)
            if self.mean is not None:
                _average(self.mean, variance_and_mean(x, valid)[1], self.tokens, tokens)
        self.tokens = self.tokens + tokens

    def _on_output_gradient(self, target: Tensor, dy: Tensor) -> None:
        if target is not self.gradient:
            return  # a backward pass after the step
        tokens = dy.shape[:-1].numel()
        _average(self.gradient, second_moment(dy), self.gradient_tokens, tokens)
        self.gradient_tokens += tokens

    def _on_weight_gradient(self, dweight: Tensor) -> None:
        if self.gradient is None or (isinstance(self.tokens, int) and self.tokens == 0):
            return
        weight = self.norm.weight.detach()
        dtype = statistics_dtype(weight.dtype)
        g = weight.to(dtype) * dweight.detach().to(dtype) / self.tokens
        # The gradient of a layer that is shared by several checkpointed segments arrives in parts.
        self.gradient.copy_(g if self.gradient_tokens == 0 else self.gradient + g)
        self.gradient_tokens += 1


def _average(target: Tensor, new: Tensor, old_tokens, new_tokens) -> None:
    """Merges the mean over further tokens into the mean in `target`."""
    if isinstance(old_tokens, int) and old_tokens == 0:
        target.copy_(new)
    else:
        target.mul_(old_tokens).add_(new * new_tokens).div_(old_tokens + new_tokens)
