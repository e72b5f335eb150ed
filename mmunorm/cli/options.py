"""Keys of `--cfg-options` that nothing reads, and what would be read."""
from __future__ import annotations

import re
from collections.abc import Iterable
from inspect import signature

from mmengine.config import Config
from mmengine.registry import (
    DATASETS,
    HOOKS,
    LOOPS,
    METRICS,
    MODELS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    TRANSFORMS,
)
from mmengine.runner import Runner

from ..config.walk import walk
from ..utils import PreflightError, misspelt, warn

# What runners read of their config beside their own arguments, and what the tools read.
READ = {*signature(Runner).parameters, 'activation_checkpointing', 'compile', 'efficient_conv_bn_eval',
        'find_unused_parameters', 'model_wrapper_cfg', 'pretrained', 'runner_type', 'strategy', 'sync_bn', 'tta_model',
        'tta_pipeline'}
# The habits of MMDetection 2: top-level keys, and names of settings.
_MOVED = dict(total_epochs='train_cfg.max_epochs', seed='randomness.seed', resume_from='load_from', fp16='--amp',
              evaluation='train_cfg.val_interval', checkpoint_config='default_hooks.checkpoint.interval',
              log_config='default_hooks.logger.interval', lr_config='param_scheduler.0')
_RENAMED = dict(samples_per_gpu='batch_size', workers_per_gpu='num_workers', grad_clip='clip_grad')


def warn_of_unread(cfg: Config, options: Iterable[str]) -> None:
    """Warns of each option with a key that neither mmengine nor mmunorm reads, such as `lr` at the top.

    Raises:
        PreflightError: an option is no argument of its class, which has one of a similar name.
    """
    for key in options:
        top = key.partition('.')[0]
        if top in READ:
            _check_spelling(cfg, key)
            continue
        name, words = key.rpartition('.')[2], set(re.findall('[a-z]+', key))
        similar = [path for path, _ in walk({part: cfg[part] for part in cfg if part in READ})
                   if path.rpartition('.')[2] == _RENAMED.get(name, name)]
        similar.sort(key=lambda path: (-len(words.intersection(re.findall('[a-z]+', path))), path.count('.')))
        similar = [_MOVED[top]] if top in _MOVED else similar[:3]
        hint = f'did you mean {" or ".join(similar)}?' if similar else 'the setting has no effect.'
        warn(f'--cfg-options {key}: nothing reads this key; {hint}')


def _check_spelling(cfg: Config, key: str) -> None:
    place, _, name = key.rpartition('.')
    top = key.partition('.')[0]
    part = dict(walk(cfg.get(top), top)).get(place)
    if not isinstance(part, dict) or not isinstance(part.get('type'), str):
        return
    registered = []
    for root in (MODELS, DATASETS, TRANSFORMS, METRICS, HOOKS, OPTIM_WRAPPERS, OPTIMIZERS, PARAM_SCHEDULERS, LOOPS):
        with root.switch_scope_and_registry(cfg.get('default_scope')) as registry:
            registered.append(registry.get(part['type']))
    classes = [cls for cls in registered if isinstance(cls, type)]
    if len(classes) == 1 and (problem := misspelt(place, {name: None}, classes[0])):
        raise PreflightError(f'--cfg-options {problem}')
