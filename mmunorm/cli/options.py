"""Keys of `--cfg-options` that nothing reads, and what would be read."""
from __future__ import annotations

import re
from collections.abc import Iterable
from inspect import signature

from mmengine.config import Config
from mmengine.hooks import CheckpointHook
from mmengine.runner import Runner

from ..config.walk import walk
from ..utils import PreflightError, misspelt, warn

# What runners read of their config besides their own arguments, and what the tools read.
READ = {*signature(Runner).parameters, 'activation_checkpointing', 'compile', 'efficient_conv_bn_eval',
        'find_unused_parameters', 'model_wrapper_cfg', 'pretrained', 'runner_type', 'strategy', 'sync_bn', 'tta_model',
        'tta_pipeline'}


def warn_of_unread(cfg: Config, options: Iterable[str]) -> None:
    """Warns of each option with a key that neither mmengine nor mmunorm reads, such as `lr` at the top.

    A misspelt argument of CheckpointHook is an error: the hook takes it, and fails at the first checkpoint.
    """
    for key in options:
        top, place, name = key.partition('.')[0], *key.rpartition('.')[::2]
        if place == 'default_hooks.checkpoint' and (problem := misspelt(place, {name: None}, CheckpointHook)):
            raise PreflightError(f'--cfg-options {problem}')
        if top in READ:
            continue
        words = set(re.findall('[a-z]+', key))
        similar = [path for path, _ in walk({part: cfg[part] for part in cfg if part in READ})
                   if path.rpartition('.')[2] == name]
        similar.sort(key=lambda path: (-len(words.intersection(re.findall('[a-z]+', path))), path.count('.')))
        hint = f'did you mean {" or ".join(similar[:3])}?' if similar else 'the setting has no effect.'
        warn(f'--cfg-options {key}: nothing reads this key; {hint}')
