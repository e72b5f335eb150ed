"""Queries of mmengine's Runner, shared by hooks."""
from __future__ import annotations

from collections import Counter

from mmengine.hooks import CheckpointHook
from mmengine.model import is_model_wrapper
from torch import nn

from ..norms.layers import norm_layers


def unwrapped_model(runner) -> nn.Module:
    """The model itself, without DistributedDataParallel or the like around it."""
    model = runner.model
    while is_model_wrapper(model):
        model = model.module
    return model


def norm_counts(model: nn.Module) -> Counter[str]:
    """How many norms of each class a model has."""
    return Counter(type(norm).__name__ for _, norm in norm_layers(model))


def saves_after_this_step(runner) -> bool:
    """Whether a CheckpointHook that counts steps saves after this step; for use in `after_train_iter`."""
    return any(isinstance(hook, CheckpointHook) and not hook.by_epoch
               and (hook.every_n_train_iters(runner, hook.interval, hook.save_begin)
                    or (hook.save_last and hook.is_last_train_iter(runner)))
               for hook in runner.hooks)
