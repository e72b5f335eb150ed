"""Hooks for training with offline norms."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from mmengine.dist import all_reduce, broadcast, broadcast_object_list, get_rank, get_world_size
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import set_random_seed
from torch import Tensor, nn

from ..checkpoints.loading import check_statistics
from ..compat import GradScaler, guards_attributes
from ..config.pretrained import pretrained_path
from ..conversion import ConversionError, convert_loaded, with_layer_norms
from ..norms import OfflineNorm, convert_sync
from ..norms.base import check_count
from ..utils import PreflightError, write_text
from .calibration import samples_of, training_batches
from .conversion import adapt_backbone, backbone_of
from .runner import saves_after_this_step, unwrapped_model


@HOOKS.register_module()
class OfflineNormHook(Hook):
    """Sets up norms for training; `tools/train.py` adds it.

    - If a run starts from a LayerNorm checkpoint, which has the norms' scale but no statistics, the hook fits the norms
      to the LayerNorms on training images (:func:`mmunorm.conversion.convert_loaded`), and trains the backbone to
      reproduce its outputs (:func:`mmunorm.adapt`). `conversion.md` in the work directory has the table. In a
      distributed run, the first process does this for all.
    - It refuses to test with such a checkpoint, and to train norms with `centered='frozen'` from weights without means.
    - When a run begins, UN, MABN and PN start their warm-up, unless the run is resumed. The hook warns if the run ends
      before the warm-up does.
    - Before each step, it passes the progress of the run, and the loss scale if there is one, to the norms.
    - In a distributed run, it sets the norms' buffers to their mean over the processes before validation and before a
      checkpoint is saved, also for EMAHook's averaged model, so that a resumed run continues like an uninterrupted one.
      Counters are rounded: `num_outliers` is the mean over the processes. Synchronized norms do not change.

    Args:
        convert (bool): False refuses to train from a LayerNorm checkpoint. Defaults to True.
        num_samples (int): training images for the conversion, held in memory. Defaults to 512.
        adapt_steps (int): training steps of the conversion, one batch each; 0 for none. Defaults to 300.
    """
    priority = 'LOW'  # after EMAHook's update, before CheckpointHook
    _norms: Sequence[OfflineNorm] = ()

    def __init__(self, convert: bool = True, num_samples: int = 512, adapt_steps: int = 300):
        self.convert = convert
        self.num_samples = check_count('num_samples', num_samples, minimum=1)
        self.adapt_steps = check_count('adapt_steps', adapt_steps, minimum=0)

    def before_test(self, runner) -> None:
        check_statistics(runner.model, _weights_of(runner))

    def before_train(self, runner) -> None:
        if self.convert and runner.iter == 0 and any(
                isinstance(norm, OfflineNorm) and norm.lacks_statistics for norm in runner.model.modules()):
            self._convert(runner)
        check_statistics(runner.model, _weights_of(runner))
        self._norms = norms = [module for module in runner.model.modules() if isinstance(module, OfflineNorm)]
        if runner.cfg.get('compile') and not guards_attributes() and any(
                isinstance(norm.warmup_iters, float) for norm in norms):
            raise PreflightError(f'OfflineNormHook: torch {torch.__version__} cannot end the warm-up of a compiled '
                                 'model; set warmup_iters to a number of steps, or use torch 2.4 or newer.')
        frozen = [norm for norm in norms if norm.centered == 'frozen']
        # Single norms may lack means, such as the output norms of a detector whose backbone comes from a classifier.
        if runner.iter == 0 and frozen and not any(norm.running_mean.any() for norm in frozen):
            raise PreflightError(
                "centered='frozen' keeps the means of the weights that a run starts from, and of the model's "
                f'{len(frozen)} such norms none has a mean: set centered=True, or start from a checkpoint of a model '
                'that was trained with centered=True.')
        warnings = [norm.start_run(resumed=runner.iter > 0, steps=runner.max_iters - runner.iter) for norm in norms]
        for warning in dict.fromkeys(filter(None, warnings)):
            runner.logger.warning(warning)

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
        if scaler is not None:
            set_loss_scale(runner.model, scaler)
        for norm in self._norms:
            norm.set_progress(runner.iter, runner.max_iters)

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        if saves_after_this_step(runner):
            self._average(runner)

    def after_train_epoch(self, runner) -> None:
        self._average(runner)

    def before_val(self, runner) -> None:
        # EMAHook exchanges the models later, in before_val_epoch.
        self._average(runner)

    def _convert(self, runner) -> None:
        """Fits the norms without statistics, and adapts the backbone, in the first process."""
        runner.logger.info('The weights are of a model with LayerNorm: fitting its norms on training images.')
        model = unwrapped_model(runner)
        problem = [None]
        if get_rank() == 0:
            try:
                batches = training_batches(runner.cfg, self.num_samples)
                backbone = backbone_of(model) if self.adapt_steps else None
                teacher = None if backbone is None else with_layer_norms(backbone)
                with _uncompiled(model):
                    report = convert_loaded(model, batches, progress=True)
                if teacher is not None:
                    adapted = adapt_backbone(model, teacher, samples_of(batches), self.adapt_steps,
                                             len(batches[0]['inputs']))
                    runner.logger.info(f'the backbone was adapted to its own outputs with LayerNorm, without labels:\n'
                                       f'{adapted}')
            except (ConversionError, PreflightError) as error:
                problem = [str(error).rstrip('.')]
        broadcast_object_list(problem)
        if problem[0] is not None:
            raise PreflightError(f'OfflineNormHook cannot fit norms to the LayerNorms of {_weights_of(runner)}: '
                                 f'{problem[0]}.')
        for value in model.state_dict().values():
            broadcast(value)
        for norm in model.modules():
            if isinstance(norm, OfflineNorm):
                norm.lacks_statistics = False
        if get_rank() == 0:
            table = Path(runner.work_dir) / 'conversion.md'
            write_text(table, report.markdown())
            runner.logger.info(f'{report.summary()}: {table}')
            for note in report.notes:
                runner.logger.warning(note)
        set_random_seed(runner.seed)  # loading the images has seeded otherwise

    def _average(self, runner) -> None:
        if get_world_size() > 1:
            averaged = [hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook)]
            average_statistics([runner.model, *averaged])


def _weights_of(runner) -> str | None:
    """The checkpoint that a run starts from."""
    return runner.cfg.get('load_from') or pretrained_path(runner.cfg)


@contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside, a model that mmengine compiled runs uncompiled, with the hooks of its modules."""
    compiled = vars(model).pop('forward', None)
    try:
        yield
    finally:
        if compiled is not None:
            model.forward = compiled


def set_loss_scale(model: nn.Module, scaler: GradScaler | Tensor | None) -> None:
    """Sets the loss scale of the following backward passes in the offline norms of a model.

    In your own training loop with a gradient scaler, call it before each `scaler.scale(loss).backward()`. Otherwise the
    gradient statistics contain the scale, and are wrong by a factor for some steps after each change of it.
    The function does not synchronize with the device.

    Args:
        model (nn.Module): the model; its norms may be on any device.
        scaler (GradScaler | Tensor, optional): the gradient scaler, or the scale `()`; None means 1.
    """
    scales: dict[torch.device, Tensor | None] = {}
    for norm in model.modules():
        if not isinstance(norm, OfflineNorm):
            continue
        device = norm.running_var.device
        if device not in scales:
            if isinstance(scaler, GradScaler):
                scales[device] = scaler.scale(torch.ones((), device=device))
            else:
                scales[device] = None if scaler is None else scaler.detach().clone().to(device)
        norm.loss_scale = scales[device]


def average_statistics(models: Iterable[nn.Module]) -> None:
    """Sets the buffers of all offline norms to their mean over the processes; all processes must call it."""
    norms = dict.fromkeys(norm for model in models for norm in model.modules() if isinstance(norm, OfflineNorm))
    buffers: list[Tensor] = [buffer for norm in norms for buffer in norm.buffers()]
    if not buffers:
        return
    # In float64, the mean of equal values is exact for any number of processes.
    values = torch.cat([buffer.detach().double().flatten() for buffer in buffers])
    all_reduce(values, op='mean')
    for buffer, mean in zip(buffers, values.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_((mean if buffer.is_floating_point() else mean.round()).view_as(buffer))


@HOOKS.register_module()
class SyncNormsHook(Hook):
    """Calls `mmunorm.convert_sync`, so that all offline norms use statistics over the processes of the run.

    `norm_cfg=dict(type='SyncUN')` does the same for UN only.
    """

    def before_train(self, runner) -> None:
        convert_sync(runner.model)
