"""Checkpoints of folded models: what is in them, and the model type that they load into.

A folded checkpoint is an ordinary one of mmengine. Its config, of the model type `FoldedModel`, is in it twice: in
`meta['mmunorm']['config']` as plain data, which :func:`load_folded` reads, and in `meta['cfg']` as text, which the
inferencers of OpenMMLab want, and run.
"""
from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner.checkpoint import save_checkpoint, weights_to_cpu
from torch import nn

from ..fusion.examples import with_plain_weights
from ..fusion.padding import Fill
from ..fusion.plan import FoldPlan
from ..fusion.report import FusionReport
from ..fusion.rewrite import FoldedNorm, add_to_state, leave
from ..fusion.streams import leave_residual
from ..norms import replace_norms
from ..utils import PreflightError, whole_file
from .plain import is_known_scope, read_config_text, registered_types_only
from .unpickling import is_trusted, restricted

FOLDED_TYPE = 'FoldedModel'
TIMM_TYPE = 'TimmModel'
_MARK = '.folded'  # the buffer of a FoldedNorm


@MODELS.register_module(name=TIMM_TYPE)
def timm_model(name: str, norm_cfg: dict | None = None, **kwargs) -> nn.Module:
    """The model `timm.create_model(name, **kwargs)`, for a folded checkpoint to name it.

    `norm_cfg` is the config of what `replace_norms` puts in place of its norms, if anything.
    """
    import timm
    model = timm.create_model(name, **kwargs)
    return model if norm_cfg is None else replace_norms(model, norm_cfg)


@MODELS.register_module(name=FOLDED_TYPE)
def folded_model(of: str, folded: Sequence[str], made: Mapping[str, int], **cfg) -> nn.Module:
    """Builds a model without some of its norms, for a folded checkpoint to be loaded into.

    Args:
        of (str): the model's own type, such as 'MaskRCNN'.
        folded (Sequence[str]): names of the norms that are folded.
        made (Mapping[str, int]): names of the tensors that came into its state by that, with their sizes.
        **cfg: its other settings, unchanged.

    Raises:
        ValueError: the model has no such norms, or no place for such tensors.
    """
    model = MODELS.build(dict(type=of, **cfg))
    plan = FoldPlan(model)
    with_plain_weights(model)
    new = [name for name in made if not name.endswith('.pad_value')]
    for name in folded:
        if hasattr(plan.modules.get(name), 'without_factors'):
            leave_residual(model, name)
        elif name in plan.norms:
            leave(model, name, new)
        else:
            raise ValueError(f'{type(model).__name__} has no norm {name} to fold, which the checkpoint has '
                             'folded: it is of another architecture')
    for name in new:
        add_to_state(model, name)
    for name in made.keys() - set(new):
        owner = name.rpartition('.')[0]
        if owner not in plan.fills:
            raise ValueError(f'{type(model).__name__}: no fold rule knows how to fill the padding of {owner}')
        plan.fills[owner](model.get_submodule(owner), Fill(next(model.parameters()).new_zeros(made[name])))
    return model


def folded_config(model_cfg: dict, names: Sequence[str], made: Mapping[str, int]) -> ConfigDict:
    """The model config that builds `model_cfg` with the norms `names` folded; `model_cfg` is unchanged.

    Weights to start from are left out: the folded checkpoint has all. `made` is :func:`folded_made`'s.
    """
    cfg = ConfigDict(copy.deepcopy(model_cfg))
    if cfg.type != FOLDED_TYPE:
        for part in ('backbone', 'enhancer'):
            if isinstance(cfg.get(part), dict):
                cfg[part].init_cfg = None
        if cfg.type == TIMM_TYPE:
            cfg.pop('pretrained', None)
        cfg.update(of=cfg.type, type=FOLDED_TYPE)
    cfg.update(folded=list(names), made=dict(made))
    return cfg


def folded_made(checkpoint: dict | nn.Module) -> dict[str, int]:
    """The names and sizes of the tensors that folding has made, of a folded model or its loaded checkpoint.

    Raises:
        PreflightError: the checkpoint does not tell it.
    """
    if isinstance(checkpoint, nn.Module):
        state = checkpoint.state_dict()
        names = [name for module in checkpoint.modules() if isinstance(module, FoldedNorm) for name in module.made]
        names += [name for name in state if name.endswith('.pad_value')]
        return {name: state[name].numel() for name in dict.fromkeys(names)}
    made = checkpoint.get('meta', {}).get('mmunorm', {}).get('made')
    if made is None or any(isinstance(size, list) for size in made.values()):
        raise PreflightError('this folded checkpoint does not tell what folding has made: it is of an older mmunorm, '
                             'or was not written by save_folded(). Fold the trained checkpoint again, with '
                             'tools/test.py --fuse --save')
    return made


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
        cfg (Config): the config of the model, folded or not; for a model of timm one whose `model` is of the type
            `TimmModel` with the `name` of the architecture and its arguments.
        path: where to write; the file appears whole or not at all.
        meta (dict, optional): of the checkpoint that the weights come from, such as its `dataset_meta`.

    Raises:
        ValueError: nothing in `model` has been folded, or `cfg` has a value that is no plain data.
    """
    state_dict = weights_to_cpu(model.state_dict())
    names = folded_norms(state_dict)
    if not names:
        raise ValueError('model: none of its norms is folded; call mmunorm.fuse_norms(model) first')
    cfg = copy.deepcopy(cfg)
    made = folded_made(model)
    cfg.model = folded_config(cfg.model, names, made)
    if cfg.get('data_preprocessor') is not None:  # mmpretrain keeps it outside of the model
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    text = cfg.pretty_text
    note = dict(
        what='A model whose norms mmunorm has folded into their neighbours. It is built by the model type '
        f'{FOLDED_TYPE}; the config in this file names it.',
        folded={fold.norm: fold.where for fold in report.folded},
        kept={fold.norm: fold.where for fold in report.kept},
        made=made,
        config=read_config_text(text))
    meta = {**(meta or {}), 'cfg': text, 'mmunorm': note}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        save_checkpoint(dict(meta=meta, state_dict=state_dict), str(part))


def load_folded(path: str | os.PathLike) -> nn.Module:
    """The model of a folded checkpoint, in eval mode: its own config builds it, of registered types alone.

    Nothing of the file runs, unless this is called inside `restricted(trusted=True)` of `mmunorm.config.unpickling`.

    Raises:
        ValueError: the checkpoint is not one that :func:`save_folded` has written.
        PreflightError: it holds code.
    """
    with restricted():
        checkpoint = torch.load(path, map_location='cpu')
        meta = checkpoint.get('meta', {}) if isinstance(checkpoint, dict) else {}
        if 'mmunorm' not in meta:
            raise ValueError(f'{path}: is no folded checkpoint; mmunorm.save_folded writes one')
        cfg = Config.fromstring(meta['cfg'], '.py') if is_trusted() else _plain_config(meta, path)
        with nullcontext() if is_trusted() else registered_types_only():
            init_default_scope(cfg.get('default_scope', 'mmengine'))
            model = MODELS.build(cfg.model)
    model.load_state_dict(checkpoint['state_dict'])
    return model.eval()


def _plain_config(meta: dict, path: str | os.PathLike) -> Config:
    """The config in a folded checkpoint. Older files have the text alone."""
    try:
        cfg = Config(meta['mmunorm'].get('config') or read_config_text(meta['cfg']))
    except ValueError as error:
        raise PreflightError(f'the checkpoint {path} has a config that is code, which is not run: {error}. If you '
                             'trust who made the file, add --trust-checkpoint, or load it inside '
                             '`mmunorm.config.unpickling.restricted(trusted=True)`.') from None
    scope = cfg.get('default_scope', 'mmengine')
    if not is_known_scope(scope):
        raise ValueError(f'{path}: default_scope={scope!r} is no package of OpenMMLab; import it first if it is yours')
    return cfg
