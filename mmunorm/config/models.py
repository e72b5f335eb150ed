"""Builds and loads the model of a config."""
from __future__ import annotations

import copy
from contextlib import contextmanager

from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from ..checkpoints.folded import folded_config, folding_of
from ..checkpoints.loading import load_weights, read_checkpoint
from ..utils import PreflightError, error_text


@contextmanager
def clear_build_errors():
    """Turns errors of what is built of a config, such as "no such type" or a missing package, into a PreflightError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AssertionError, ImportError) as error:
        if isinstance(error, KeyError) and ' ' not in str(error):  # a missing key, not a message
            raise
        raise PreflightError(f'cannot build the config: {error_text(error)} (--verbose shows where)') from error


def build_model(cfg: Config) -> nn.Module:
    """The model of a config, on the CPU, with uninitialized weights."""
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    model = copy.deepcopy(cfg.model)  # building adds keys
    if cfg.get('data_preprocessor') is not None:  # mmpretrain keeps it outside of the model
        model.setdefault('data_preprocessor', copy.deepcopy(cfg.data_preprocessor))
    with clear_build_errors():
        return MODELS.build(model)


def load_model(cfg: Config, checkpoint: str) -> nn.Module:
    """The model of a config with trained weights, in eval mode; folded if the checkpoint is folded."""
    match_folded(cfg, checkpoint)
    model = build_model(cfg)
    load_weights(model, checkpoint)
    return model.eval()


def match_folded(cfg: Config, checkpoint: str) -> None:
    """Changes `cfg` in place to the config of the folded model if the checkpoint is folded."""
    if structure := folding_of(read_checkpoint(checkpoint)):
        cfg.model = folded_config(cfg.model, structure)
