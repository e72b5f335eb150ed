"""Checkpoints of folded models: what is in them, and the model type that they load into.

A folded checkpoint is an ordinary one of mmengine. Its config is in it, as mmengine's own Runner saves it,
with the model type `FoldedModel`, so that the inferencers of mmdet and mmpretrain build the folded structure
by themselves.
"""
from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path

from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import save_checkpoint, weights_to_cpu
from torch import nn

from ..files import whole_file
from .fuse import FusionReport, fold_structure

FOLDED_TYPE = 'FoldedModel'
_MARK = '.folded'  # the buffer of a FoldedNorm


@MODELS.register_module(name=FOLDED_TYPE)
def folded_model(of: str, folded: Sequence[str], **cfg) -> nn.Module:
    """Builds a model without some of its norms, for a folded checkpoint to be loaded into.

    Args:
        of (str): the model's own type, such as 'MaskRCNN'.
        folded (Sequence[str]): names of the norms that are folded.
        **cfg: its other settings, unchanged.

    Returns:
        nn.Module: a model of type `of`.

    Raises:
        ValueError: the model has no such norms.
    """
    model = MODELS.build(dict(type=of, **cfg))
    fold_structure(model, folded)
    return model


def folded_config(model_cfg: dict, names: Sequence[str]) -> ConfigDict:
    """The model config that builds `model_cfg` with the norms `names` folded; `model_cfg` is unchanged.

    Weights to start the backbone or an enhancer from are left out: the folded checkpoint has all.
    """
    cfg = ConfigDict(copy.deepcopy(model_cfg))
    if cfg.type == FOLDED_TYPE:
        return ConfigDict({**cfg, 'folded': list(names)})
    for part in ('backbone', 'enhancer'):
        if isinstance(cfg.get(part), dict):
            cfg[part].init_cfg = None
    return ConfigDict({**cfg, 'type': FOLDED_TYPE, 'of': cfg.type, 'folded': list(names)})


def folded_norms(checkpoint: dict) -> list[str]:
    """The names of the norms that are folded in a loaded checkpoint; none if it is not folded."""
    state_dict = checkpoint.get('state_dict', checkpoint)
    return [key.removesuffix(_MARK) for key in state_dict if key.endswith(_MARK)]


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
    names = folded_norms(state_dict)
    if not names:
        raise ValueError('model: none of its norms is folded; call mmunorm.fuse_norms(model) first')
    cfg = copy.deepcopy(cfg)
    cfg.model = folded_config(cfg.model, names)
    note = dict(
        what='A model whose norms mmunorm has folded into their neighbours. It is built by the model type '
        f'{FOLDED_TYPE}; the config in this file names it.',
        folded={fold.norm: fold.where for fold in report.folded},
        kept={fold.norm: fold.where for fold in report.kept})
    meta = {**(meta or {}), 'cfg': cfg.pretty_text, 'mmunorm': note}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        save_checkpoint(dict(meta=meta, state_dict=state_dict), str(part))
