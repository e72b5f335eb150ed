"""Saves and loads checkpoints of folded models.

A folded checkpoint is an ordinary checkpoint with a note of the tensors that folding added. :func:`load_folded` loads
it into the model as it was before folding. `meta['cfg']` may have a config of the model type `FoldedModel` as text,
which OpenMMLab's inferencers execute.
"""
from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import nn

from ..compat import forget_compiled_code
from ..fusion.basis import is_layer_scale
from ..fusion.examples import with_plain_weights
from ..fusion.joint import join
from ..fusion.padding import Fill
from ..fusion.partial_calls import WHOLE, calls_of, refuse_hidden_states, refuses_hidden_states, scopes_of, set_scopes
from ..fusion.plan import FoldPlan
from ..fusion.reduced import Folded, StreamBasis, TokenScale, refuse_save_pretrained, set_streams, streams_of
from ..fusion.replaced import note_norms, noted_norms
from ..fusion.report import FusionReport
from ..fusion.rewrite import add_to_state, reduce_norm, replace_by_identity, replace_module
from ..modules import uncompiled, unwrapped
from ..registry import MODELS, is_missing
from ..utils import PreflightError, check_module, whole_file, written_file
from .layouts import computed_tables

FOLDED_TYPE = 'FoldedModel'
_MARK, _PADDING = '.folded', '.pad_value'  # buffers of folded norms, and of modules that pad with a token
# Attributes of modules that change what is computed, and that no tensor shows.
_SETTINGS = ('num_heads', 'stride', 'padding', 'dilation', 'groups', 'eps', 'global_pool', 'approximate')


def without_norms(model: nn.Module, folded: Sequence[str], made: Mapping[str, int],
                  reduced: Mapping[str, dict] | None = None, scopes: Mapping[str, str] | None = None,
                  calls: Sequence[str] = WHOLE) -> nn.Module:
    """Changes a model in place to the structure of a folded model, so that a folded checkpoint loads; returns it.

    Args:
        model (nn.Module): a model of the same architecture, with any norms.
        folded (Sequence[str]): names of the folded norms.
        made (Mapping[str, int]): names and sizes of the tensors that folding added to the state_dict.
        reduced (Mapping[str, dict], optional): for each norm of which a scale stays, the arguments of its
            :class:`mmunorm.fusion.TokenScale`. Defaults to none.
        scopes (Mapping[str, str], optional): for each folded norm that has a scope, the name of that module; see
            `mmunorm.fusion.partial_calls`. Defaults to none.
        calls (Sequence[str]): the methods that run the whole model.

    Raises:
        ValueError: the model lacks such norms, or such tensors cannot be added.
    """
    plan = FoldPlan(model)
    with_plain_weights(model)
    new = [name for name in made if not name.endswith(_PADDING)]
    for name in folded:
        module = plan.modules.get(name)
        if hasattr(module, 'without_factors'):
            replace_module(model, name, module.without_factors())
        elif name in (reduced or {}):
            reduce_norm(model, name, reduced[name], new)
        elif name in plan.norms or is_layer_scale(module):
            replace_by_identity(model, name, new)
        else:
            raise ValueError(f'{type(model).__name__} has no norm {name}, which is folded in the checkpoint: it is '
                             f'{"folded already" if isinstance(module, Folded) else "of another architecture"}')
    for name in new:
        add_to_state(model, name)
    for name in made.keys() - set(new):
        owner = name.removesuffix(_PADDING)
        if owner not in plan.fills:
            raise ValueError(f'{type(model).__name__}: no fold rule fills the padding of {owner}')
        plan.fills[owner](model.get_submodule(owner), Fill(next(model.parameters()).new_zeros(made[name])))
    set_scopes(model, scopes or {}, calls)
    refuse_save_pretrained(model)
    forget_compiled_code()
    return model


def folding_of(source: nn.Module | dict) -> dict:
    """The arguments of :func:`without_norms` for a folded model or its loaded checkpoint; empty if it is not folded.

    Raises:
        PreflightError: the checkpoint does not say what folding added.
    """
    is_model = isinstance(source, nn.Module)
    state_dict = source.state_dict() if is_model else source.get('state_dict', source)
    folded = [name.removesuffix(_MARK) for name in state_dict if name.endswith(_MARK)]
    if not folded:
        return {}
    if is_model:
        parts = {name: module for name, module in source.named_modules() if isinstance(module, Folded)}
        added = [name for part in parts.values() for name in part.added]
        added += [name for name in state_dict if name.endswith(_PADDING)]
        return dict(folded=folded, made={name: state_dict[name].numel() for name in dict.fromkeys(added)},
                    reduced={name: part.arguments for name, part in parts.items() if isinstance(part, TokenScale)},
                    scopes=scopes_of(source), calls=list(calls_of(source)))
    note = source.get('meta', {}).get('mmunorm', {})
    if 'made' not in note or any(isinstance(size, list) for size in note['made'].values()):
        raise PreflightError('this folded checkpoint lacks the names of the tensors that folding added: it is of an '
                             'older mmunorm, or was not written by save_folded(). Fold the trained checkpoint again '
                             'with tools/test.py --fuse --save')
    return dict(folded=folded, **{key: note[key] for key in ('made', 'reduced', 'scopes', 'calls') if key in note})


def save_folded(model: nn.Module, path: str | os.PathLike, cfg=None, report: FusionReport | None = None,
                meta: dict | None = None) -> None:
    """Writes the checkpoint of a folded model.

    Args:
        model (nn.Module): a model folded by `fuse_norms`. Names of wrappers, such as those of `torch.compile`,
            `DataParallel` and `AveragedModel`, are left out.
        path: path of the file, which is written atomically; symbolic links are kept.
        cfg (mmengine.Config, optional): the config of the model, folded or not, for OpenMMLab's inferencers. Defaults
            to None.
        report (FusionReport, optional): the result of `fuse_norms`, stored as a note.
        meta (dict, optional): the `meta` of the original checkpoint, such as its `dataset_meta`.

    Raises:
        TypeError: `model` is no module, or `path` is no path.
        ValueError: no norm of `model` is folded.
        PreflightError: `path` is there and is no regular file, such as a folder or a device.
    """
    check_module(model)
    path = written_file(_path(path, 'save_folded(model, path)'))
    model = unwrapped(model)
    with uncompiled(model):
        structure = folding_of(model)
        if not structure:
            raise ValueError('model: none of its norms is folded; call mmunorm.fuse_norms(model) first')
        state_dict = {name: value.cpu() if isinstance(value, torch.Tensor) else value
                      for name, value in model.state_dict().items()}
        note = dict(structure, what='A model whose norms mmunorm folded into the adjacent layers.',
                    settings=_settings(model), layers=noted_norms(model), streams=[*map(vars, streams_of(model))],
                    hidden_states_changed=refuses_hidden_states(model))
    del note['folded']  # the state_dict has these names
    if report is not None:
        note.update(folded={fold.norm: fold.where for fold in (*report.folded, *report.reduced)},
                    kept={fold.norm: fold.where for fold in report.kept})
    meta = {**(meta or {}), 'mmunorm': note}
    if cfg is not None:
        cfg = copy.deepcopy(cfg)
        cfg.model = folded_config(cfg.model, structure)
        if cfg.get('data_preprocessor') is not None:  # mmpretrain keeps it outside of the model
            cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
        meta['cfg'] = cfg.pretty_text
    path.parent.mkdir(parents=True, exist_ok=True)
    content = BytesIO()  # so that a full disk raises an OSError
    torch.save(dict(meta=meta, state_dict=state_dict), content)
    with whole_file(path) as part:
        part.write_bytes(content.getbuffer())


def load_folded(path: str | os.PathLike, model: nn.Module) -> nn.Module:
    """Loads the model of a folded checkpoint, in eval mode.

    No code in the file is executed.

    Args:
        path: path of a file written by :func:`save_folded`.
        model (nn.Module): a model of the same architecture, not folded, with any norms, such as timm's LayerNorms. It
            is changed in place, unless the file does not fit.

    Raises:
        TypeError: `path` is no path, or `model` is no module.
        ValueError: the file is no folded checkpoint, or one of another architecture.
    """
    path = _path(path, 'load_folded(path, model)')
    check_module(model)
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except (KeyError, EOFError, UnpicklingError) as error:
        raise ValueError(f'{path}: not a checkpoint ({type(error).__name__}: {error})') from error
    _check_folded(checkpoint, path)
    inner = unwrapped(model)
    if any(isinstance(module, Folded) for module in inner.modules()):
        raise ValueError('model: it is folded already; give one of the same architecture that is not')
    if any(parameter.is_meta for parameter in inner.parameters()):
        raise ValueError('model: it is on the meta device; call model.to_empty(device="cpu") first')
    with uncompiled(inner):
        # A copy is tried first, so that a model that the file does not fit stays unchanged.
        for target in (copy.deepcopy(inner), inner):
            try:
                without_norms(target, **folding_of(checkpoint))
                _load(target, checkpoint)
                _check_settings(target, checkpoint['meta']['mmunorm'])
            except (RuntimeError, AttributeError, ValueError) as error:
                raise ValueError(f'{path}: is of another architecture than {type(model).__name__}: {error}') from error
    return model.eval()


def _settings(model: nn.Module) -> dict[str, dict]:
    """The settings of each module that has some, as plain data."""
    settings = {name: {key: vars(module)[key] for key in _SETTINGS
                       if isinstance(vars(module).get(key), (bool, int, float, str, tuple))}
                for name, module in model.named_modules()}
    return {name: values for name, values in settings.items() if values}


def _check_settings(model: nn.Module, note: Mapping) -> None:
    """Raises a ValueError if modules have other settings than in the folded model; older files have no note of them."""
    settings = _settings(model)
    for name, values in note.get('settings', {}).items():
        for key, value in settings.get(name, {}).items():
            if key in values and values[key] != value:
                raise ValueError(f'{join(name, key)} is {values[key]!r} in the file and {value!r} in the model')


def _load(model: nn.Module, checkpoint: Mapping) -> None:
    """Loads the weights of a folded checkpoint into a model of its structure, and notes what is folded where."""
    with computed_tables(model):
        model.load_state_dict(checkpoint['state_dict'])
    note, modules = checkpoint['meta']['mmunorm'], dict(model.named_modules())
    layers = note.get('layers', {})
    set_streams(model, (StreamBasis(**stream) for stream in note.get('streams', ())))
    if note.get('hidden_states_changed', note.get('streams')):
        refuse_hidden_states(model)
    if note.get('changed_streams') and 'streams' not in note:
        warnings.warn('this folded checkpoint is of an older mmunorm: its parts, if they are called alone, such as '
                      'forward_features(), return tokens in another basis. Fold and save it again', stacklevel=3)
    note_norms(model, {layer: norms for layer, norms in layers.items() if layer in modules})


def _path(path: str | os.PathLike, call: str) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f'path: must be a path, got {type(path).__name__}; the arguments are {call}')
    return Path(path)


def _check_folded(checkpoint, path: str | os.PathLike) -> None:
    if not isinstance(checkpoint, dict) or 'mmunorm' not in checkpoint.get('meta', {}):
        raise ValueError(f'{path}: not a folded checkpoint; mmunorm.save_folded writes one')


def folded_config(model_cfg: dict, structure: Mapping) -> dict:
    """The model config that builds `model_cfg` folded; `structure` is :func:`folding_of`'s. `model_cfg` is unchanged.

    Initial weights are left out, because the folded checkpoint has all weights.
    """
    from mmengine.config import ConfigDict
    cfg = ConfigDict(copy.deepcopy(model_cfg))
    if cfg.type != FOLDED_TYPE:
        for name, part in cfg.items():
            if isinstance(part, dict) and (name == 'backbone' or 'init_cfg' in part):
                part.init_cfg = None
        # ReplacedNorms has an `of` itself.
        cfg.update(of=dict(type=cfg.type, of=cfg.of) if 'of' in cfg else cfg.type, type=FOLDED_TYPE)
    cfg.update(structure)
    return cfg


if not is_missing('mmengine'):

    @MODELS.register_module(name=FOLDED_TYPE)
    def folded_model(of: str | dict, folded: Sequence[str], made: Mapping[str, int],
                     reduced: Mapping[str, dict] | None = None, scopes: Mapping[str, str] | None = None,
                     calls: Sequence[str] = WHOLE, changed_streams: bool = False, **cfg) -> nn.Module:
        """Builds the model of type `of` with the settings `cfg`, and folds its norms: see :func:`without_norms`.

        A dict `of` is the type with settings of its own. `changed_streams` is in older files.
        """
        of = of if isinstance(of, dict) else dict(type=of)
        return without_norms(MODELS.build({**cfg, **of}), folded, made, reduced, scopes, calls)
