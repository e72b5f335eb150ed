"""Prepares a training or test run: hooks, and the Runner."""
from __future__ import annotations

import os

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import HOOKS, RUNNERS
from mmengine.runner import Runner

from ..config.models import clear_build_errors
from ..engine.runner import norm_counts, unwrapped_model
from ..utils import PreflightError
from .data_checks import class_name

# Variables that each launcher sets in the environment of its processes.
_LAUNCHERS = dict(pytorch='RANK', slurm='SLURM_PROCID', mpi='OMPI_COMM_WORLD_LOCAL_RANK')


def add_hooks(cfg: Config, *names: str) -> None:
    """Adds hooks that are registered, except those that the config's `custom_hooks` already name."""
    hooks = list(cfg.get('custom_hooks') or [])
    named = {class_name(hook) for hook in hooks}
    cfg.custom_hooks = [*hooks, *(dict(type=name) for name in names
                                  if name not in named and name in HOOKS.module_dict)]


def build_runner(cfg: Config) -> Runner:
    """Builds the Runner of a config. Without a GPU, the processes of a distributed run talk over gloo."""
    if _LAUNCHERS.get(cfg.launcher, 'PATH') not in os.environ:
        raise PreflightError(f'--launcher {cfg.launcher} is for processes started by '
                             f'{"torchrun" if cfg.launcher == "pytorch" else cfg.launcher}: use tools/dist_train.sh, '
                             'tools/dist_test.sh or tools/slurm_train.sh.')
    if cfg.launcher == 'pytorch' and get_device() == 'cpu':
        # mmengine would select a GPU, both for the process group and for the model.
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group('gloo')
        cfg.setdefault('model_wrapper_cfg', dict(
            type='MMDistributedDataParallel', broadcast_buffers=False,
            find_unused_parameters=cfg.get('find_unused_parameters', False)))
        cfg.model_wrapper_cfg.device_ids = None
    with clear_build_errors():
        return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)


def log_summary(runner: Runner) -> None:
    """Logs model and device in two lines."""
    model = unwrapped_model(runner)
    parts = [type(model).__name__]
    if hasattr(model, 'backbone'):
        parts.append(f'backbone {type(model.backbone).__name__}')
    norms = norm_counts(model).most_common()
    parts.append('norms: ' + (', '.join(f'{number} {kind}' for kind, number in norms) or 'none'))
    parts.append(f'{sum(weight.numel() for weight in model.parameters()) / 1e6:.3g} million parameters')
    processes = f'{runner.world_size} processes on ' if runner.world_size > 1 else ''
    runner.logger.info('; '.join(parts))
    runner.logger.info(f'{processes}{get_device()}; results in {runner.work_dir}, the whole log in {runner.log_dir}')
