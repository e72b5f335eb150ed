"""Arguments shared by the tools, the config that they define, and one-line errors."""
from __future__ import annotations

import argparse
import functools
import gc
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.device import get_device
from mmengine.runner import Runner

from ..checkpoints.reading import reading
from ..config.presets import HELP, apply_norm, use_map_forms
from ..config.pretrained import pretrained_path, set_pretrained
from ..config.walk import walk
from ..utils import LocalError, PreflightError, RunError, error_text, is_first_process, one_line, written_file

# What runners read of their config besides their own arguments, and what the tools read.
_USED_KEYS = {*signature(Runner).parameters, 'activation_checkpointing', 'compile', 'efficient_conv_bn_eval',
         'find_unused_parameters', 'model_wrapper_cfg', 'pretrained', 'runner_type', 'strategy', 'sync_bn'}


def command(main):
    """Makes a tool's `main` print an error as one line and exit with its status.

    That is 2 for a PreflightError, 3 for a RunError or an OSError, such as a full disk, and 130 for Ctrl+C. With
    `--verbose`, the traceback is printed before the line. Denormal numbers are flushed to zero. At the end of a
    distributed run, the process group is closed.
    """

    @functools.wraps(main)
    def wrapper(argv=None):
        argv = sys.argv[1:] if argv is None else argv
        # After a softmax, the -100 between shifted windows is a denormal number. CPUs are slow with those: a digits
        # Swin in float32 trains 2.6 times as fast without them (benchmarks/NOTES.md).
        torch.set_flush_denormal(True)
        try:
            with reading(trusted=_is_given('--trust-checkpoint', argv)), warnings.catch_warnings():
                # LiteRT's converter starts JAX, which no worker of a data loader uses.
                warnings.filterwarnings('ignore', r'os\.fork\(\) was called', RuntimeWarning)
                result = main(argv)
        except KeyboardInterrupt:
            print('interrupted', file=sys.stderr)
            raise SystemExit(130) from None
        except (PreflightError, RunError, OSError) as error:
            # Only the process of a distributed run that raised the error can report it.
            if is_first_process() or isinstance(error, (LocalError, OSError)):
                if _is_given('--verbose', argv):
                    traceback.print_exc()
                print(f'error: {one_line(error)}', file=sys.stderr)
            raise SystemExit(getattr(error, 'status', 3)) from None
        finally:
            torch.set_flush_denormal(False)
        if torch.distributed.is_initialized():
            # A gloo thread aborts the process if it frees its last tensor while Python shuts down.
            # The group joins its threads once nothing refers to it, neither the model nor its runner.
            gc.collect()
            torch.distributed.destroy_process_group()
        return result

    return wrapper


def _is_given(flag: str, argv: Sequence[str]) -> bool:
    """Whether an argument is this flag, or an abbreviation that argparse accepts."""
    return any(len(argument) > 3 and flag.startswith(argument) for argument in argv)


def bounded(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """A `type` of argparse: whole numbers or floats from `low` to `high`."""
    def number(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            limits = f'at least {low}' if high == math.inf else f'from {low} to {high}'
            raise argparse.ArgumentTypeError(f'must be {limits}, got {text}')
        return value

    return number


positive = bounded(int, 1)
non_negative = bounded(int, 0)
threads = bounded(int, 1, 1024)  # thousands would hang or exhaust the machine
fraction = bounded(float, 0, 1)


def device(text: str) -> str:
    """An argument that names an available torch device, for argparse's `type`."""
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
        raise argparse.ArgumentTypeError(f'must be such as cpu or cuda:0, got {text!r}: {one_line(error)}') from None
    return text


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`, by default a GPU if there is one."""
    parser.add_argument('--device', type=device, default=get_device(), help='e.g. cpu or cuda:0')


class _Options(DictAction):
    """mmengine's action for KEY=VALUE pairs; what it cannot read is an error of the argument."""

    def __call__(self, parser, namespace, values, option_string=None):
        try:
            super().__call__(parser, namespace, values, option_string)
        except (AssertionError, RecursionError) as error:
            raise argparse.ArgumentError(self, f'{values}: {error}') from None


def add_config_arguments(parser: argparse.ArgumentParser, norm: bool = True) -> None:
    """Adds `--cfg-options`, as the stock OpenMMLab tools have it, and `--norm`."""
    if norm:
        parser.add_argument('--norm', metavar='NORM',
                            help='replace every norm of the backbone (of a stock one every LayerNorm and RMSNorm); '
                            'the names of the work directory and of the '
                            f'backbone weights follow. NORM is one of {HELP}')
    parser.add_argument('--cfg-options', nargs='+', action=_Options, type=_key_and_value, metavar='KEY=VALUE',
                        help='override settings of the config, e.g. train_dataloader.batch_size=4; lists are written '
                        'key="[a,b]". pretrained=PATH names the backbone weights to start from; pretrained=None starts '
                        'without any')
    add_trust_argument(parser)
    parser.add_argument('--verbose', action='store_true',
                        help='also print the traceback of an error')


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--trust-checkpoint`, which :func:`command` reads."""
    parser.add_argument('--trust-checkpoint', action='store_true',
                        help='load checkpoints with other objects than weights and plain data, which may run code; '
                        'before torch 2.4, those of a training need it')


def add_runner_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that training and testing share, as the stock OpenMMLab tools have them."""
    parser.add_argument('--work-dir', help='folder for logs and checkpoints; work_dirs/CONFIG by default')
    add_config_arguments(parser)
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none',
                        help='how the processes of a distributed run were started')
    # torch.distributed.launch passes one spelling or the other.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def _key_and_value(text: str) -> str:
    """An argument that mmengine's DictAction can split, for argparse's `type`."""
    if text.find('=') < 1:
        raise argparse.ArgumentTypeError(f'takes KEY=VALUE pairs, got {text!r}')
    if re.search(r'[=[(,]\s*(dict\(|\{)', text):
        raise argparse.ArgumentTypeError(f'takes no dict as a value; set its keys one by one, such as '
                                         f'param_scheduler.0.end=30, or write it into the config; got {text!r}')
    return text


def load_config(path: str, options: dict | None = None, norm: str | None = None) -> Config:
    """Reads a config, applies `--norm`, then merges `--cfg-options`, which override the norm.

    The option `pretrained` also sets the initial weights of the backbone. With a norm, `work_dir` is set if the config
    has none.
    """
    package, _, name = str(path).rpartition('::')
    if package and (spec := find_spec(package)):  # as in `_base_`
        path = os.path.join(spec.submodule_search_locations[0], '.mim/configs', name)
    if not os.path.isfile(path):
        raise PreflightError(f'there is no config file {path} (working directory {os.getcwd()}).')
    try:
        cfg = Config.fromfile(path)
        parts = list(cfg.values())  # imports the modules of a pure Python config
    except Exception as error:  # a config is code and may raise anything
        raise PreflightError(f'cannot read the config {path}: {error_text(error)}') from error
    for _, part in walk(parts):
        # mmengine sets this scope for configs from a `_base_` of `mmunorm::`, and mmunorm has no registries.
        if isinstance(part, dict) and part.get('_scope_') == 'mmunorm':
            del part['_scope_']
    if 'pretrained' in cfg and pretrained_path(cfg) is not None:
        # If a config overrides the variable, the init_cfg that it inherits still has the old value.
        set_pretrained(cfg, cfg.pretrained)
    _merge(cfg, path, options)
    if not isinstance(cfg.get('model'), dict):
        raise PreflightError(f"the config {path} has no `model`, a dict(type=...), but {cfg.get('model')!r}.")
    if norm is not None:
        apply_norm(cfg, norm, options)
        _merge(cfg, path, options)
    use_map_forms(cfg)
    return cfg


def _merge(cfg: Config, path: str, options: dict | None) -> None:
    if not options:
        return
    for key in {option.partition('.')[0] for option in options} - {*cfg, *_USED_KEYS}:
        if similar := get_close_matches(key, cfg, cutoff=0.8):  # new keys are allowed
            raise PreflightError(f'--cfg-options {key}: {path} has no such key; did you mean {similar[0]}?')
    try:
        cfg.merge_from_dict(options)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise PreflightError(f'--cfg-options does not fit {path}: {error_text(error)}') from error
    if 'pretrained' in options:
        if not isinstance(options['pretrained'], (str, type(None))):
            raise PreflightError(f"--cfg-options pretrained={options['pretrained']!r}: must be a checkpoint or None.")
        set_pretrained(cfg, options['pretrained'])


def apply_runner_arguments(cfg: Config, args: argparse.Namespace) -> None:
    """Applies the arguments of `add_runner_arguments` and the stock dataloader defaults, in place."""
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        if not args.work_dir or os.path.isfile(args.work_dir):
            raise PreflightError(f'--work-dir {args.work_dir!r}: it must be a folder.')
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = os.path.join('work_dirs', Path(args.config).stem)
    set_dataloader_defaults(cfg)


def set_dataloader_defaults(cfg: Config) -> None:
    """Applies the stock dataloader defaults, in place."""
    for dataloader in filter(None, (cfg.get(f'{split}_dataloader') for split in ('train', 'val', 'test'))):
        if cfg.get('default_scope') == 'mmpretrain':  # mmpretrain's own tool sets these
            dataloader.setdefault('pin_memory', torch.cuda.is_available())
            dataloader.setdefault('persistent_workers', True)
            dataloader.setdefault('collate_fn', dict(type='default_collate'))
        if dataloader.get('num_workers') == 0:
            dataloader['persistent_workers'] = False  # torch refuses it without workers


def out_folder(path: str | os.PathLike, option: str = '--out') -> Path:
    """The folder of an option such as `--out`, created if it is missing."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightError(f'{option} {path}: must be a writable folder ({error.strerror}).') from error
    if path == '' or not os.access(path, os.W_OK):
        raise PreflightError(f"{option} {path or repr('')}: must be a writable folder.")
    return Path(path)


def out_file(path: str | os.PathLike, option: str, *inputs: str) -> None:
    """Checks that an option such as `--out` names a writable file; creates its folder if it is missing."""
    out_folder(Path(path).parent, option)
    try:
        written_file(path)
    except PreflightError as error:
        raise PreflightError(f'{option} {error}') from None
    if os.path.realpath(path) in map(os.path.realpath, inputs):
        raise PreflightError(f'{option} {path} would overwrite an input of this command; choose another file.')
