"""What the command-line tools share: their arguments, a config made ready, errors of one line."""
from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import os
import signal
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.device import get_device
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS
from mmengine.runner import CheckpointLoader, Runner

from ..fusion import folded_config, folded_norms
from .errors import PreflightError, RunError
from .preflight import check_norms, folder_problem, pretrained_path
from .resume import find_resumable


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--cfg-options`, as the stock OpenMMLab tools have it."""
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=_ConfigOptions,
        metavar='KEY=VALUE',
        help='override settings of the config, e.g. train_dataloader.batch_size=4; lists are written '
        'key="[a,b]". pretrained=PATH names the backbone weights to start from, pretrained=None starts '
        'without')


def add_runner_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that training and testing share, as the stock OpenMMLab tools have them."""
    parser.add_argument('--work-dir', help='folder for logs and checkpoints; work_dirs/CONFIG by default')
    add_config_arguments(parser)
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='how the processes of a distributed run were started')
    # torch.distributed.launch passes one spelling or the other.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


class _ConfigOptions(DictAction):
    """mmengine's DictAction, with a usage error in place of a traceback."""

    def __call__(self, parser, namespace, values, option_string=None):
        for value in values:
            if '=' not in value:
                parser.error(f'{option_string} takes KEY=VALUE pairs, got {value!r}')
        super().__call__(parser, namespace, values, option_string)


def command(main):
    """Makes a tool's `main` print a PreflightError or RunError as one line and exit with status 2 or 3.

    The processes of a distributed run part in order when they are done.
    """

    @functools.wraps(main)
    def wrapper(argv=None):
        try:
            result = main(argv)
        except (PreflightError, RunError) as error:
            if _is_first_process():
                print(f'error: {error}', file=sys.stderr)
            raise SystemExit(3 if isinstance(error, RunError) else 2) from None
        if torch.distributed.is_initialized():
            # A gloo thread that lets go of its last tensor while Python shuts down aborts the process.
            # The group joins its threads when nothing refers to it, neither the model nor its runner.
            gc.collect()
            torch.distributed.destroy_process_group()
        return result

    return wrapper


def load_config(path: str, options: dict | None = None) -> Config:
    """Reads a config and merges `--cfg-options`, of which `pretrained` also sets the backbone's weights.

    Raises:
        PreflightError: the file is missing or has an error, an option does not fit it, or a norm is wrong.
    """
    if not os.path.isfile(path):
        raise PreflightError(f'there is no config file {path} (working directory {os.getcwd()}).')
    try:
        cfg = Config.fromfile(path)
    except Exception as error:  # a config is code: anything may be raised
        raise PreflightError(f'cannot read the config {path}: {_describe(error)}') from error
    if 'pretrained' in cfg and 'model' in cfg and pretrained_path(cfg) is not None:
        # A config that sets the variable anew has inherited an init_cfg made of the old one.
        set_pretrained(cfg, cfg.pretrained)
    if options:
        try:
            cfg.merge_from_dict(options)
        except (KeyError, TypeError, IndexError) as error:
            raise PreflightError(f'--cfg-options does not fit {path}: {_describe(error)}') from error
        if 'pretrained' in options:
            set_pretrained(cfg, options['pretrained'])
    if 'model' not in cfg:
        raise PreflightError(f'the config {path} has no `model`.')
    check_norms(cfg)
    return cfg


def set_pretrained(cfg: Config, checkpoint: str | None) -> None:
    """Makes the backbone start from `checkpoint`, one of a whole classifier, or from nothing if None."""
    if 'backbone' not in cfg.model:
        raise PreflightError('`pretrained` names backbone weights, but the model has no backbone.')
    if 'pretrained' in cfg:  # or the variable wins when the config is read from its dump
        cfg.pretrained = checkpoint
    if checkpoint is None:
        cfg.model.backbone.pop('init_cfg', None)
    elif pretrained_path(cfg) is not None:
        cfg.model.backbone.init_cfg.checkpoint = checkpoint
    else:
        cfg.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=checkpoint, prefix='backbone.')


def prepare(cfg: Config, args: argparse.Namespace) -> None:
    """Applies the arguments of `add_runner_arguments` and the stock dataloader defaults, in place."""
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = os.path.join('work_dirs', Path(args.config).stem)
    for split in ('train', 'val', 'test'):
        dataloader = cfg.get(f'{split}_dataloader')
        if dataloader is not None:
            _set_dataloader_defaults(dataloader, cfg.get('default_scope'))


def _set_dataloader_defaults(dataloader: dict, scope: str | None) -> None:
    if scope == 'mmpretrain':  # whose own tool sets these
        dataloader.setdefault('pin_memory', torch.cuda.is_available())
        dataloader.setdefault('persistent_workers', True)
        dataloader.setdefault('collate_fn', dict(type='default_collate'))
    if dataloader.get('num_workers') == 0:
        dataloader['persistent_workers'] = False  # torch refuses it without workers


def enable_amp(cfg: Config) -> None:
    """Turns mixed precision on: float16 with a loss scale on a GPU, bfloat16 on a CPU."""
    wrapper = cfg.optim_wrapper
    if get_device() == 'cpu':
        wrapper.type = 'BFloat16OptimWrapper'
        for key in ('loss_scale', 'dtype'):
            wrapper.pop(key, None)
    else:
        wrapper.type = 'AmpOptimWrapper'
        wrapper.setdefault('loss_scale', 'dynamic')


def enable_auto_scale_lr(cfg: Config) -> None:
    """Turns on scaling of the learning rate by the batch size.

    Raises:
        PreflightError: the config does not say which batch size its learning rate is for.
    """
    if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
        raise PreflightError('--auto-scale-lr needs `auto_scale_lr=dict(base_batch_size=...)` in the config: '
                             'the total batch size that its learning rate is for.')
    cfg.auto_scale_lr.enable = True


def add_training_hooks(cfg: Config) -> None:
    """Adds the hooks of every training run, those that the config's own `custom_hooks` do not name."""
    hooks = list(cfg.get('custom_hooks') or [])
    named = {_class_name(hook) for hook in hooks}
    for name in ('UNWarmupHook', 'LossScaleHook', 'AverageStatisticsHook', 'RepeatableHook',
                 'DivergenceHook'):
        if name not in named:
            hooks.append(dict(type=name))
    cfg.custom_hooks = hooks


def _class_name(hook: dict | Hook) -> str:
    """The bare name of a hook's class, which a config gives as text, with or without a scope, or itself."""
    kind = hook.get('type') if isinstance(hook, dict) else type(hook)
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition('.')[-1]


def keep_two_checkpoints(cfg: Config) -> None:
    """Lets a run that keeps one checkpoint keep two.

    mmengine removes the old one before it writes the next: a run that is killed then has none.
    """
    hook = (cfg.get('default_hooks') or {}).get('checkpoint')
    if isinstance(hook, dict) and hook.get('max_keep_ckpts') == 1:
        hook['max_keep_ckpts'] = 2
        warn('max_keep_ckpts=1 leaves no checkpoint while the next is written: keeping 2.')


def set_resume(cfg: Config, resume: str | None) -> None:
    """Applies `--resume`: a checkpoint, 'auto' for the latest in the work directory, or None.

    A run that continues takes all its weights from there, so pretrained ones are not looked for, and its seed
    where the config has none. The latest is what :func:`find_resumable` finds, whatever an interrupted run
    has left beside it; with none in the work directory the run starts at the beginning, and says so.

    Raises:
        PreflightError: the checkpoint does not exist, cannot be read, or is a folder that the run cannot use.
    """
    if resume == 'auto' or resume is None and cfg.get('resume') and cfg.get('load_from') is None:
        source, damaged = find_resumable(cfg.work_dir)
        where = 'the run starts at the beginning' if source is None else f'resuming from {source}'
        if damaged:
            warn(f'{damaged[0]} was not written to its end: {where}.')
        elif source is None:
            warn(f'there is no checkpoint in {cfg.work_dir} to resume from: {where}.')
        # With nothing to load mmengine would look itself, and take what was refused here.
        cfg.resume = source is not None
        cfg.load_from = source or cfg.get('load_from')
    elif resume is not None:
        cfg.resume, cfg.load_from = True, resume
    source = cfg.get('load_from')
    if source is None:
        return
    check_checkpoint(source, folder=_reads_folders(cfg))
    if pretrained_path(cfg) is not None:
        cfg.model.backbone.init_cfg = None
    if cfg.get('resume') and not os.path.isdir(source):
        _take_seed(cfg, source)


def _reads_folders(cfg: Config) -> bool:
    """Whether the run's checkpoints may be folders, as those of sharded training are."""
    strategy = (cfg.get('strategy') or {}).get('type')
    return 'runner_type' in cfg and strategy not in (None, 'SingleDeviceStrategy', 'DDPStrategy')


def _take_seed(cfg: Config, checkpoint: str) -> None:
    """Goes on with the seed of a run whose config has none: mmengine builds the sampler before it resumes."""
    randomness = cfg.get('randomness') or {}
    if randomness.get('seed') is None:
        seed = (read_checkpoint(checkpoint).get('meta') or {}).get('seed')
        cfg.randomness = {**randomness, 'seed': seed}


def warn(message: str) -> None:
    """Prints a warning, once for all processes of a distributed run."""
    if _is_first_process():
        print(f'warning: {message}', file=sys.stderr)


def _is_first_process() -> bool:
    return (os.environ.get('RANK') or os.environ.get('SLURM_PROCID') or '0') == '0'


def check_checkpoint(path: str, folder: bool = False) -> None:
    """Raises a PreflightError if a local checkpoint is no file; `folder` lets it be a folder."""
    if '://' in path or os.path.isfile(path):
        return
    if not os.path.isdir(path):
        raise PreflightError(f'there is no checkpoint {path} (working directory {os.getcwd()}).')
    if not folder:
        raise PreflightError(folder_problem(path))


def match_folded(cfg: Config, checkpoint: str) -> None:
    """Lets `cfg` build a model without norms if that is what is in the checkpoint.

    Raises:
        PreflightError: the checkpoint does not exist, or cannot be read.
    """
    if names := folded_norms(read_checkpoint(checkpoint)):
        cfg.model = folded_config(cfg.model, names)


def read_checkpoint(path: str) -> dict:
    """A checkpoint, on the CPU.

    Raises:
        PreflightError: it does not exist, or is none.
    """
    check_checkpoint(path)
    try:
        content = CheckpointLoader.load_checkpoint(path, map_location='cpu')
    except Exception as error:  # whatever unpickling a file that is no checkpoint raises
        raise PreflightError(f'cannot read the checkpoint {path}: {_describe(error)}') from error
    if not isinstance(content, dict) or not isinstance(content.get('state_dict', content), dict):
        raise PreflightError(f'{path} is no checkpoint: it holds a {type(content).__name__} without a '
                             '`state_dict`.')
    return content


def train(runner: Runner) -> None:
    """Trains, and lets hooks that hold data write them when an error or Ctrl-C ends the run.

    mmengine calls `after_train` only at a run's proper end. Of each hook that has a method
    `flush(runner)`, it is called here.
    """
    try:
        runner.train()
    except BaseException:
        for hook in runner.hooks:
            if hasattr(hook, 'flush'):
                try:
                    hook.flush(runner)
                except Exception as error:  # must not hide what ended the run
                    runner.logger.warning(
                        f'{type(hook).__name__} could not write its data: {_describe(error)}')
        raise


def build_runner(cfg: Config) -> Runner:
    """Builds the Runner of a config, with processes that talk over gloo where there is no GPU.

    Raises:
        PreflightError: the config names a type that is not registered.
    """
    if cfg.launcher == 'pytorch':
        if 'RANK' not in os.environ:
            raise PreflightError('--launcher pytorch is for processes started by torchrun: use '
                                 'tools/dist_train.sh or tools/dist_test.sh.')
        _end_with_launcher()
        if get_device() == 'cpu':
            _distribute_on_cpu(cfg)
    with clear_build_errors():
        return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)


@contextmanager
def clear_build_errors():
    """Turns a registry's "no such type" into a PreflightError."""
    try:
        yield
    except KeyError as error:
        if 'registry' not in str(error):
            raise
        raise PreflightError(f'cannot build what the config describes: {_describe(error)}') from error


def _end_with_launcher() -> None:
    """Lets Linux end this process when torchrun is killed, which gives it a session of its own.

    It would train on, beside the run that is resumed in the same work directory.
    """
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def _distribute_on_cpu(cfg: Config) -> None:
    # mmengine would select a GPU, both for the process group and for the model.
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group('gloo')
    cfg.setdefault('model_wrapper_cfg', dict(
        type='MMDistributedDataParallel',
        broadcast_buffers=False,
        find_unused_parameters=cfg.get('find_unused_parameters', False)))
    cfg.model_wrapper_cfg.device_ids = None


def _describe(error: Exception) -> str:
    """An exception as one line, with the place in the config that raised it."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    text = f'{type(error).__name__}: {" ".join(str(message).split())}'
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f'{text} ({place.filename}, line {place.lineno})' if place.name == '<module>' else text
