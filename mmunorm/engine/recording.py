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
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..analysis.layers import channel_axis, norm_layers, num_channels
from ..analysis.normality import LEAST_STEPS, pnac
from ..analysis.record import FILENAME, OFFLINE_GRADIENT, ONLINE_GRADIENT, Layer, RecordError, RecordWriter
from ..norms import OfflineNorm, PRepBN
from ..norms.kernels import second_moment, statistics_dtype
from .errors import PreflightError

# Steps that wait in memory (a GPU's, where the model is there) for being written together.
BLOCK_STEPS = 100
BLOCK_BYTES = 16 * 2**20


@HOOKS.register_module()
class NormStatisticsHook(Hook):
    """Records activation and gradient statistics of norm layers into one file of the work directory.

    Of each recorded step and layer: the mean square of the input over all tokens, per channel (the paper's
    `s`); of norms with running statistics the gradient statistic `g = mean(gamma * dy * z)` (Eq. 6-9), of
    others, and of PRepBN, which blends LayerNorm in, the mean square of the gradient at their output;
    outlier steps so far; and now and then the running variances. They are those of the step itself,
    whatever the norm averages or filters, and those of the first process in a distributed run.
    :mod:`mmunorm.analysis.record` reads the file.

    The gradients are those of the loss as it is propagated: without the loss scale of mixed precision, with
    the division by the steps of a gradient accumulation. A statistic is NaN where none came: the
    gradient of a frozen layer, everything of a layer that did not run. A layer that runs several times
    in a step has the statistics of all its tokens but padded ones, which a `pad_mask` names; a gradient that
    reaches a padded token counts. With activation checkpointing the first of both forward
    passes counts. Steps wait in memory, at most 100 and 16 MiB, and are written together and before every
    checkpoint, so a resumed run has no gap. :func:`mmunorm.engine.launch.train` writes them also when an
    error ends the run, or Ctrl-C.

    The visualizer shows `norm/outlier_share`, the share of outlier steps, and
    `norm/pnac_activation` and `norm/pnac_gradient`, the mean PNAC of all layers, over the last `span`
    recorded steps, as often as steps are written.

    Args:
        interval (int): record every n-th step. Defaults to 1.
        layers (Sequence[str], optional): regular expressions; the norms with a name that one of them is
            found in. Defaults to None: all norms.
        span (int): recorded steps that the numbers for the visualizer are of, at least 20; as many are kept
            in memory. Defaults to 100.

    Raises:
        ValueError: an argument is out of its range.
        PreflightError: when training begins; no norm has such a name, or a record of other layers or of
            another `interval` is in the way of a resumed run.
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
        self._taps: list[_Tap] = []
        self._writer: RecordWriter | None = None

    def before_train(self, runner) -> None:
        self._taps = []
        if not is_main_process():
            return
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        norms = self._choose(model)
        layers = [Layer(name, type(norm).__name__, num_channels(norm), _gradient_kind(norm))
                  for name, norm in norms]
        config = getattr(runner.cfg, 'filename', None)
        info = dict(run=os.path.basename(os.path.normpath(runner.work_dir)),
                    config=os.path.basename(config) if config else None,
                    interval=self.interval, processes=get_world_size())
        try:
            self._writer = RecordWriter(
                Path(runner.work_dir, FILENAME), layers, info, resume_step=runner.iter)
        except RecordError as error:
            raise PreflightError(f'NormStatisticsHook: {error}') from error
        self._norms = [norm for _, norm in norms]
        self._filters = [getattr(norm, 'outlier_filter', False) for norm in self._norms]
        self._prepare_memory(layers)
        self._taps = [_Tap(norm, self._block[:, :, columns], layer.gradient == OFFLINE_GRADIENT)
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
        self._outliers = torch.empty(size, sum(self._filters), dtype=torch.long, device=device)
        self._steps: list[int] = []
        self._complete = 0  # of these
        self._loss_scales: list[float] = []
        self._recent: list[np.ndarray] = []

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        if not self._taps or (runner.iter + 1) % self.interval:
            return
        row = len(self._steps)
        self._block[row].fill_(float('nan'))
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
        """Writes the steps that wait in memory, but for one that was broken off, and records no more."""
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
        snapshot = np.zeros(1, self._writer.snapshot_dtype)
        snapshot['step'] = self._steps[-1]
        snapshot['running_var'] = self._running_var()
        # Before they are written: what interrupts that must not have them written again.
        self._steps, self._loss_scales, self._complete = [], [], 0
        self._writer.append(rows, snapshot)
        self._publish(runner, rows)

    def _running_var(self) -> np.ndarray:
        values = torch.full_like(self._block[0, 0], float('nan'))
        for norm, columns in zip(self._norms, self._columns, strict=True):
            if getattr(norm, 'running_var', None) is not None:
                values[columns] = norm.running_var.detach()
        return values.cpu().numpy()

    def _publish(self, runner, rows: np.ndarray) -> None:
        """Hands what the last `span` steps show to the logger."""
        recent = np.concatenate([*self._recent, rows])[-self.span:]
        self._recent = [recent.copy()]  # a view would keep all that it is cut from
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


def _gradient_kind(norm: nn.Module) -> str:
    # The gradient of PRepBN's gamma is that of its BatchNorm branch alone.
    is_offline = isinstance(norm, (OfflineNorm, _BatchNorm)) and not isinstance(norm, PRepBN)
    return OFFLINE_GRADIENT if is_offline else ONLINE_GRADIENT


class _Tap:
    """What is taken from one norm on its way through a step.

    For an offline norm `g` costs nothing: the gradient of gamma, summed over tokens, is `sum(dy * z)`.

    Args:
        norm: the layer.
        block: `(rows, 2, C)`, where activation and gradient statistics go.
        offline: whether the gradient statistic is `g`.
    """

    def __init__(self, norm: nn.Module, block: Tensor, offline: bool):
        self.norm = norm
        self.block = block
        self.offline = offline
        self.axis = channel_axis(norm)
        self.row = None
        self.handles = []
        self.attach()

    def attach(self) -> None:
        """Puts the hooks on the norm."""
        self.handles.append(self.norm.register_forward_hook(self._on_forward, with_kwargs=True))
        weight = getattr(self.norm, 'weight', None)
        if self.offline and weight is not None and weight.requires_grad:
            self.handles.append(weight.register_hook(self._on_weight_gradient))

    def open(self, row: int) -> None:
        """Begins a step whose statistics go to `row`."""
        self.row = row
        self.tokens = 0
        self.gradient_tokens = 0

    def close(self) -> None:
        """Ends the step: what runs until the next is not recorded."""
        self.row = None

    def remove(self) -> None:
        """Takes the hooks from the norm."""
        while self.handles:
            self.handles.pop().remove()

    def _on_forward(self, norm, args, kwargs, output) -> None:
        if self.row is None:
            return
        if not self.offline and output.requires_grad:
            row = self.row
            output.register_hook(lambda dy: self._on_output_gradient(row, dy))
        if torch._C._current_graph_task_id() != -1:
            return  # the second forward of activation checkpointing, inside the backward pass
        x = args[0] if args else next(iter(kwargs.values()))
        if x.numel() == 0:
            return
        pad_mask = kwargs.get('pad_mask', args[1] if len(args) > 1 else None)
        valid = ~pad_mask if isinstance(pad_mask, Tensor) and pad_mask.dtype == torch.bool else None
        with torch.no_grad():
            x = x.detach().movedim(self.axis, -1)
            tokens = x.shape[:-1].numel() if valid is None else valid.sum()
            self._average(self.block[self.row, 0], second_moment(x, valid), self.tokens, tokens)
        self.tokens = self.tokens + tokens

    def _on_output_gradient(self, row: int, dy: Tensor) -> None:
        if row != self.row:
            return
        dy = dy.movedim(self.axis, -1)
        tokens = dy.shape[:-1].numel()
        self._average(self.block[row, 1], second_moment(dy), self.gradient_tokens, tokens)
        self.gradient_tokens += tokens

    def _on_weight_gradient(self, dweight: Tensor) -> None:
        if self.row is None or (isinstance(self.tokens, int) and self.tokens == 0):
            return
        weight = self.norm.weight.detach()
        dtype = statistics_dtype(weight.dtype)
        g = weight.to(dtype) * dweight.detach().to(dtype) / self.tokens
        target = self.block[self.row, 1]
        # A layer that several checkpointed segments share gets its gradient in parts.
        target.copy_(g if self.gradient_tokens == 0 else target + g)
        self.gradient_tokens += 1

    @staticmethod
    def _average(target: Tensor, new: Tensor, old_tokens, new_tokens) -> None:
        """Joins the mean over further tokens to the mean that `target` holds."""
        if isinstance(old_tokens, int) and old_tokens == 0:
            target.copy_(new)
        else:
            target.mul_(old_tokens).add_(new * new_tokens).div_(old_tokens + new_tokens)
