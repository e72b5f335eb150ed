"""Checkpoints of folded models: what is in them, and the model type that they load into.

A folded checkpoint is an ordinary one of mmengine. Its config is in it, as mmengine's own Runner saves it,
with the model type `FoldedModel`, so that the inferencers of mmdet and mmpretrain build the folded structure
by themselves.
"""
from __future__ import annotations

import copy
import os
from pathlib import Path

from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import save_checkpoint, weights_to_cpu
from torch import nn

from .fuse import FusionReport, fuse_norms

FOLDED_TYPE = 'FoldedModel'


@MODELS.register_module(name=FOLDED_TYPE)
def folded_model(of: str, **cfg) -> nn.Module:
    """Builds a model without its foldable norms, for a folded checkpoint to be loaded into.

    Args:
        of (str): the model's own type, such as 'MaskRCNN'.
        **cfg: its other settings, unchanged.

    Returns:
        nn.Module: a model of type `of`, in training mode as any new model.
    """
    model = MODELS.build(dict(type=of, **cfg)).eval()
    fuse_norms(model)
    return model.train()


def folded_config(model_cfg: dict) -> ConfigDict:
    """The model config that builds the folded structure of `model_cfg`, which itself is unchanged.

    Weights to start the backbone from are left out: the folded checkpoint has all.
    """
    cfg = ConfigDict(copy.deepcopy(model_cfg))
    if cfg.type == FOLDED_TYPE:
        return cfg
    if isinstance(cfg.get('backbone'), dict):
        cfg.backbone.init_cfg = None
    return ConfigDict({**cfg, 'type': FOLDED_TYPE, 'of': cfg.type})


def is_folded(checkpoint: dict) -> bool:
    """Whether a loaded checkpoint is of a folded model."""
    state_dict = checkpoint.get('state_dict', checkpoint)
    return any(key.endswith('.folded') for key in state_dict)


def save_folded(model: nn.Module, report: FusionReport, cfg: Config, path: str | os.PathLike,
                meta: dict | None = None) -> None:
    """Writes the checkpoint of a folded model, with its config and a note of what it is.

    Args:
        model (nn.Module): folded by `fuse_norms`.
        report (FusionReport): what that returned.
        cfg (Config): the config of the model, folded or not.
        path: where to write; the file appears whole or not at all.
        meta (dict, optional): of the checkpoint that the weights come from, such as its `dataset_meta`.

    Raises:
        ValueError: nothing in `model` has been folded.
    """
    state_dict = weights_to_cpu(model.state_dict())
    if not is_folded(state_dict):
        raise ValueError('model: none of its norms is folded; call mmunorm.fuse_norms(model) first')
    cfg = copy.deepcopy(cfg)
    cfg.model = folded_config(cfg.model)
    note = dict(
        what='A model whose norms mmunorm has folded into their neighbours. It is built by the model type '
        f'{FOLDED_TYPE}; the config in this file names it.',
        folded={fold.norm: fold.where for fold in report.folded},
        kept={fold.norm: fold.where for fold in report.kept})
    meta = {**(meta or {}), 'cfg': cfg.pretty_text, 'mmunorm': note}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f'.{path.name}.{os.getpid()}')
    try:
        save_checkpoint(dict(meta=meta, state_dict=state_dict), str(unfinished))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
