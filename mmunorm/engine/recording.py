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
from torch import nn

from ..analysis.normality import LEAST_STEPS, pnac
from ..hooks import unwrapped_model
from ..norms.layers import norm_layers, num_channels
from ..recording.record import FOLDER, OFFLINE_GRADIENT, Layer, RecordError, RecordWriter
from ..recording.taps import Tap, gradient_kind
from ..utils import PreflightError

# The most steps that wait in memory, to be written together. The memory is the GPU's if the model is there.
BLOCK_STEPS = 100
BLOCK_BYTES = 16 * 2**20


@HOOKS.register_module()
class NormStatisticsHook(Hook):
    """Records activation and gradient statistics of norm layers into a folder of the work directory.

    For each recorded step and layer, the folder has

    - the mean square of the input over all tokens, per channel (the paper's `s`);
    - for a norm with running statistics, the gradient statistic `g = mean(gamma * dy * z)` (Eq. 6-9);
    - for another norm, and for PRepBN, which blends LayerNorm in, the mean square of the gradient at its output;
    - the outlier steps so far;
    - now and then, the running variances and the means of the inputs.

    The statistics are those of the step itself, before the norm averages or filters them. In a distributed run,
    they are those of the first process. :mod:`mmunorm.recording.record` reads them.

    The gradients do not contain the loss scale of mixed precision. They do contain the division by the steps of a
    gradient accumulation. A statistic is NaN where there is none: the gradient of a frozen layer, and everything of
    a layer that did not run. For a layer that runs several times in a step, the statistics cover the tokens of all
    these runs. Tokens that a `pad_mask` marks as padding are left out, but a gradient that reaches such a token
    counts. With activation checkpointing, the first of the two forward passes counts.

    Steps wait in memory, at most 100 steps and 16 MiB. They are written together, and before every checkpoint, so a
    resumed run has no gap. :func:`mmunorm.cli.training.train` also writes them when an error or Ctrl-C ends the run.

    Each time that steps are written, the visualizer gets numbers of the last `span` recorded steps.
    `norm/outlier_share` is the share of outlier steps. `norm/pnac_activation` and `norm/pnac_gradient` are the mean
    PNAC of all layers.

    Args:
        interval (int): record every n-th step. Defaults to 1.
        layers (Sequence[str], optional): regular expressions. A norm is recorded if one of them is found in its
            name. Defaults to None: all norms.
        span (int): how many recorded steps the visualizer's numbers cover, at least 20. So many steps are kept in
            memory. Defaults to 100.

    Raises:
        ValueError: an argument is out of its range.
        PreflightError: when training begins: no norm has such a name, or a resumed run meets a record of other
            layers or of another `interval`.
    """

    def __init__(self, interval: int = 1, layers: Sequence[str] | None = None, span: int = 100):
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f'interval must be an int of at least 1, got {interval!r}')
        if not isinstance(span, int) or span < LEAST_STEPS:
            raise ValueError(f'span must be an int of at least {LEAST_STEPS}, got {span!r}')
        if layers is not None and (isinstance(layers, str) or not layers):
            raise ValueError('layers must be a list of one regular expression or more, or None for all '
                             f'norms, got {layers!r}')
        self.interval = interval
        self.patterns = layers
        self.span = span
        self._taps: list[Tap] = []
        self._writer: RecordWriter | None = None

    def before_train(self, runner) -> None:
        self._taps = []
        if not is_main_process():
            return
        norms = self._choose(unwrapped_model(runner))
        layers = [Layer(name, type(norm).__name__, num_channels(norm), gradient_kind(norm))
                  for name, norm in norms]
        config = getattr(runner.cfg, 'filename', None)
        info = dict(run=os.path.basename(os.path.normpath(runner.work_dir)),
                    config=os.path.basename(config) if config else None,
                    interval=self.interval, processes=get_world_size())
        try:
            self._writer = RecordWriter(
                Path(runner.work_dir, FOLDER), layers, info, resume_step=runner.iter)
        except RecordError as error:
            raise PreflightError(f'NormStatisticsHook: {error}') from error
        self._norms = [norm for _, norm in norms]
        self._filters = [getattr(norm, 'outlier_filter', False) for norm in self._norms]
        self._prepare_memory(layers)
        self._taps = [Tap(norm, self._block[:, :, columns], self._mean[columns], layer.gradient == OFFLINE_GRADIENT)
                      for norm, layer, columns in zip(self._norms, layers, self._columns, strict=True)]

    def _choose(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        found = [(name, norm) for name, norm in norm_layers(model) if num_channels(norm) is not None]
        names = [name for name, _ in found]
        if self.patterns is not None:
            for pattern in self.patterns:
                if not any(re.search(pattern, name) for name in names):
                    raise PreflightError(f'NormStatisticsHook: layers: no norm has a name with {pattern!r} '
                                         f'in it; the model has {", ".join(names) or "no norm"}.')
            found = [(name, norm) for name, norm in found
                     if any(re.search(pattern, name) for pattern in self.patterns)]
        if not found:
            raise PreflightError('NormStatisticsHook: the model has no norm to record.')
        return found

    def _prepare_memory(self, layers: list[Layer]) -> None:
        ends = np.cumsum([layer.channels for layer in layers]).tolist()
        self._columns = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        size = max(1, min(BLOCK_STEPS, BLOCK_BYTES // (8 * ends[-1])))
        device = next((p.device for norm in self._norms for p in norm.parameters()), torch.device('cpu'))
        self._block = torch.empty(size, 2, ends[-1], device=device)
        self._mean = torch.empty(ends[-1], device=device)
        self._outliers = torch.empty(size, sum(self._filters), dtype=torch.long, device=device)
        self._steps: list[int] = []
        self._complete = 0  # how many of these steps have ended
        self._loss_scales: list[float] = []
        self._recent: list[np.ndarray] = []

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        if not self._taps or (runner.iter + 1) % self.interval:
            return
        row = len(self._steps)
        self._block[row].fill_(float('nan'))
        if row == 0:
            self._mean.fill_(float('nan'))
        for tap in self._taps:
            tap.open(row)
        scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
        self._loss_scales.append(scaler.get_scale() if hasattr(scaler, 'get_scale') else 1.0)
        self._steps.append(runner.iter + 1)

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        if not self._taps or not self._steps or self._steps[-1] != runner.iter + 1:
            return
        for tap in self._taps:
            tap.close()
        if any(self._filters):
            counts = [norm.num_outliers for norm, has in zip(self._norms, self._filters, strict=True) if has]
            torch.stack(counts, out=self._outliers[len(self._steps) - 1])
        self._complete = len(self._steps)
        if self._complete == len(self._block):
            self._write(runner)

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        self._write(runner)

    def after_train(self, runner) -> None:
        self.flush(runner)

    def flush(self, runner) -> None:
        """Writes the steps that wait in memory, except an interrupted one, and stops recording."""
        if self._taps:
            del self._steps[self._complete:]
        self._write(runner)
        for tap in self._taps:
            tap.remove()
        self._taps = []

    def _write(self, runner) -> None:
        if not self._taps or not self._steps:
            return
        count = len(self._steps)
        scales = np.array(self._loss_scales[:count], np.float32)
        block = self._block[:count].cpu().numpy()
        rows = np.zeros(count, self._writer.step_dtype)
        rows['step'] = self._steps
        rows['activation'] = block[:, 0]
        rows['gradient'] = block[:, 1]
        if (scales != 1).any():
            for i, columns in enumerate(self._columns):
                power = 1 if self._writer.layers[i].gradient == OFFLINE_GRADIENT else 2
                rows['gradient'][:, columns] /= scales[:, None]**power
        rows['outliers'] = -1
        rows['outliers'][:, self._filters] = self._outliers[:count].cpu().numpy()
        running_var, mean = self._running_var(), self._mean.cpu().numpy()
        # Cleared before the write: an interruption of it must not make `flush` write the steps again.
        self._steps, self._loss_scales, self._complete = [], [], 0
        self._writer.append(rows, running_var, mean)
        self._publish(runner, rows)

    def _running_var(self) -> np.ndarray:
        values = torch.full_like(self._block[0, 0], float('nan'))
        for norm, columns in zip(self._norms, self._columns, strict=True):
            if getattr(norm, 'running_var', None) is not None:
                values[columns] = norm.running_var.detach()
        return values.cpu().numpy()

    def _publish(self, runner, rows: np.ndarray) -> None:
        """Hands the numbers of the last `span` steps to the logger."""
        recent = np.concatenate([*self._recent, rows])[-self.span:]
        self._recent = [recent.copy()]  # a view would keep the whole array in memory
        if len(recent) < LEAST_STEPS:
            return
        for field in ('activation', 'gradient'):
            percents = np.array([pnac(recent[field][:, columns]).percent for columns in self._columns])
            if np.isfinite(percents).any():
                runner.message_hub.update_scalar(f'train/norm/pnac_{field}', np.nanmean(percents))
        if any(self._filters):
            counts = recent['outliers'][:, self._filters]
            share = (counts[-1] - counts[0]).mean() / (recent['step'][-1] - recent['step'][0])
            runner.message_hub.update_scalar('train/norm/outlier_share', share)
