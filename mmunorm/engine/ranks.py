"""One state of the norms for all processes of a distributed run."""
from __future__ import annotations

from collections.abc import Iterable

import torch
from mmengine.dist import all_reduce, get_world_size
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS
from torch import Tensor, nn

from ..norms import OfflineNorm, convert_sync
from .hooks import saves_after_this_step


@HOOKS.register_module()
class AverageStatisticsHook(Hook):
    """Averages the processes' norm statistics before validation and before a checkpoint is saved.

    Each process of a distributed run that does not synchronize its norms has statistics of its own tokens.
    With their mean over the processes neither the validation nor the checkpoint depends on which process
    does it, and a resumed run, which starts on every process from the checkpoint, goes on as the
    uninterrupted one does. Training goes on from the mean.

    Averaged are all buffers of the offline norms, of the model and of EMAHook's averaged one: running
    statistics, records and `psi`; counters are rounded to whole steps, so that `num_outliers` is what one
    process has seen on average. Norms that synchronize have nothing to average, and keep their values.
    """
    priority = 'LOW'  # after EMAHook's update, before CheckpointHook

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        if saves_after_this_step(runner):
            self._average(runner)

    def after_train_epoch(self, runner) -> None:
        self._average(runner)

    def before_val(self, runner) -> None:
        # EMAHook exchanges the models later, in before_val_epoch.
        self._average(runner)

    def _average(self, runner) -> None:
        if get_world_size() == 1:
            return
        averaged = [hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook)]
        average_statistics([runner.model, *averaged])


def average_statistics(models: Iterable[nn.Module]) -> None:
    """Sets the buffers of all offline norms to their mean over the processes; all processes must call it."""
    norms = dict.fromkeys(norm for model in models for norm in model.modules()
                          if isinstance(norm, OfflineNorm))
    buffers: list[Tensor] = [buffer for norm in norms for buffer in norm.buffers()]
    if not buffers:
        return
    # In float64 equal values keep every bit, whatever the number of processes.
    values = torch.cat([buffer.detach().double().flatten() for buffer in buffers])
    all_reduce(values, op='mean')
    for buffer, mean in zip(buffers, values.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_((mean if buffer.is_floating_point() else mean.round()).view_as(buffer))


@HOOKS.register_module()
class SyncNormsHook(Hook):
    """Synchronizes the statistics of all offline norms of a model over the processes of a run.

    As `mmunorm.convert_sync` on the model; `norm_cfg=dict(type='SyncUN')` does so for UN alone.
    """

    def before_train(self, runner) -> None:
        convert_sync(runner.model)
