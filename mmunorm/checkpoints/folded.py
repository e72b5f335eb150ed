"""Checkpoints of folded models: what is in them, and how a model becomes one that they load into.

A folded checkpoint is an ordinary one, with a note of what folding has made. With a config of mmengine, of the model
type `FoldedModel`, it builds its model by itself. That is in it twice: in `meta['mmunorm']['config']` as plain data,
which :func:`load_folded` reads, and in `meta['cfg']` as text, which the inferencers of OpenMMLab want, and run. Without
a config, :func:`load_folded` is given the model as it was before folding.
"""
from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path

import torch
from torch import nn

from ..fusion.examples import with_plain_weights
from ..fusion.padding import Fill
from ..fusion.plan import FoldPlan
from ..fusion.report import FusionReport
from ..fusion.rewrite import FoldedNorm, add_to_state, leave
from ..fusion.streams import leave_residual
from ..norms import replace_norms
from ..registry import MODELS, lacks
from ..utils import PreflightError, whole_file

FOLDED_TYPE = 'FoldedModel'
TIMM_TYPE = 'TimmModel'
_MARK = '.folded'  # the buffer of a FoldedNorm


def without_norms(model: nn.Module, folded: Sequence[str], made: Mapping[str, int]) -> nn.Module:
    """Gives a model the structure of a folded one, in place, for a folded checkpoint to be loaded into; returns it.

    Args:
        model (nn.Module): of the architecture that was folded, with any norms.
        folded (Sequence[str]): names of the norms that are folded.
        made (Mapping[str, int]): names of the tensors that came into its state by that, with their sizes.

    Raises:
        ValueError: the model has no such norms, or no place for such tensors.
    """
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


def save_folded(model: nn.Module, path: str | os.PathLike, cfg=None, report: FusionReport | None = None,
                meta: dict | None = None) -> None:
    """Writes the checkpoint of a folded model.

    Args:
        model (nn.Module): folded by `fuse_norms`.
        path: where to write; the file appears whole or not at all.
        cfg (mmengine.Config, optional): the config of the model, folded or not, with which `load_folded(path)` needs no
            model; for one of timm, its `model` is of the type `TimmModel` with the `name` of the architecture and its
            arguments. Defaults to None: `load_folded` is to be given the model.
        report (FusionReport, optional): what `fuse_norms` returned, for a note in the file.
        meta (dict, optional): of the checkpoint that the weights come from, such as its `dataset_meta`.

    Raises:
        ValueError: nothing in `model` has been folded, or `cfg` has a value that is no plain data.
    """
    state_dict = {name: value.cpu() if isinstance(value, torch.Tensor) else value
                  for name, value in model.state_dict().items()}
    names = folded_norms(state_dict)
    if not names:
        raise ValueError('model: none of its norms is folded; call mmunorm.fuse_norms(model) first')
    made = folded_made(model)
    note = dict(what='A model whose norms mmunorm has folded into their neighbours.', made=made)
    if report is not None:
        note.update(folded={fold.norm: fold.where for fold in report.folded},
                    kept={fold.norm: fold.where for fold in report.kept})
    meta = {**(meta or {}), 'mmunorm': note}
    if cfg is not None:
        from .plain import read_config_text
        cfg = copy.deepcopy(cfg)
        cfg.model = folded_config(cfg.model, names, made)
        if cfg.get('data_preprocessor') is not None:  # mmpretrain keeps it outside of the model
            cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
        meta['cfg'] = cfg.pretty_text
        note['config'] = read_config_text(meta['cfg'])
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = BytesIO()  # a full disk is an OSError then
    torch.save(dict(meta=meta, state_dict=state_dict), content)
    with whole_file(path) as part:
        part.write_bytes(content.getbuffer())


def load_folded(path: str | os.PathLike, model: nn.Module | None = None) -> nn.Module:
    """The model of a folded checkpoint, in eval mode.

    Nothing of the file runs, unless this is called inside `restricted(trusted=True)` of
    `mmunorm.checkpoints.unpickling`.

    Args:
        path: of a file that :func:`save_folded` has written.
        model (nn.Module, optional): of the same architecture, as it was before folding; its norms may be any, such as
            timm's LayerNorms. It is changed in place. Defaults to None: the config in the file builds the model, of
            registered types alone.

    Raises:
        ValueError: the checkpoint is not one that :func:`save_folded` has written, has no config and there is no
            `model`, or `model` is of another architecture.
        PreflightError: it holds code.
    """
    if model is not None:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        _check_folded(checkpoint, path)
        without_norms(model, folded_norms(checkpoint), folded_made(checkpoint))
    else:
        if lacks('mmengine'):
            raise ValueError(f'{path}: without mmengine, load_folded needs the model: load_folded(path, model)')
        from .unpickling import restricted
        with restricted():
            checkpoint = torch.load(path, map_location='cpu')
            _check_folded(checkpoint, path)
            model = _build(checkpoint['meta'], path)
    try:
        model.load_state_dict(checkpoint['state_dict'])
    except RuntimeError as error:
        raise ValueError(f'{path}: is of another architecture than {type(model).__name__}: {error}') from error
    return model.eval()


def _check_folded(checkpoint, path: str | os.PathLike) -> None:
    if not isinstance(checkpoint, dict) or 'mmunorm' not in checkpoint.get('meta', {}):
        raise ValueError(f'{path}: is no folded checkpoint; mmunorm.save_folded writes one')


def _build(meta: dict, path: str | os.PathLike) -> nn.Module:
    """The model of the config in a folded checkpoint."""
    from mmengine.config import Config
    from mmengine.registry import init_default_scope

    from .plain import registered_types_only
    from .unpickling import is_trusted
    if 'cfg' not in meta:
        raise ValueError(f'{path}: has no config that builds its model; call load_folded(path, model)')
    cfg = Config.fromstring(meta['cfg'], '.py') if is_trusted() else _plain_config(meta, path)
    with nullcontext() if is_trusted() else registered_types_only():
        init_default_scope(cfg.get('default_scope', 'mmengine'))
        return MODELS.build(cfg.model)


def folded_config(model_cfg: dict, names: Sequence[str], made: Mapping[str, int]) -> dict:
    """The model config that builds `model_cfg` with the norms `names` folded; `model_cfg` is unchanged.

    Weights to start from are left out: the folded checkpoint has all. `made` is :func:`folded_made`'s.
    """
    from mmengine.config import ConfigDict
    cfg = ConfigDict(copy.deepcopy(model_cfg))
    if cfg.type != FOLDED_TYPE:
        for name, part in cfg.items():
            if isinstance(part, dict) and (name == 'backbone' or 'init_cfg' in part):
                part.init_cfg = None
        if cfg.type == TIMM_TYPE:
            cfg.pop('pretrained', None)
        cfg.update(of=cfg.type, type=FOLDED_TYPE)
    cfg.update(folded=list(names), made=dict(made))
    return cfg


def _plain_config(meta: dict, path: str | os.PathLike):
    """The config in a folded checkpoint. Older files have the text alone."""
    from mmengine.config import Config

    from .plain import is_known_scope, read_config_text
    try:
        cfg = Config(meta['mmunorm'].get('config') or read_config_text(meta['cfg']))
    except ValueError as error:
        raise PreflightError(f'the checkpoint {path} has a config that is code, which is not run: {error}. If you '
                             'trust who made the file, add --trust-checkpoint, or load it inside '
                             '`mmunorm.checkpoints.unpickling.restricted(trusted=True)`.') from None
    scope = cfg.get('default_scope', 'mmengine')
    if not is_known_scope(scope):
        raise ValueError(f'{path}: default_scope={scope!r} is no package of OpenMMLab; import it first if it is yours')
    return cfg


if not lacks('mmengine'):

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
        """Builds the model of type `of` with the settings `cfg`, and takes its norms: see :func:`without_norms`."""
        return without_norms(MODELS.build(dict(type=of, **cfg)), folded, made)
