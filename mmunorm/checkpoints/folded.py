"""Saves and loads checkpoints of folded models.

A folded checkpoint is an ordinary checkpoint with a note of the tensors that folding added. It may contain an mmengine
config of the model type `FoldedModel`, from which its model is built. The config is stored twice: as plain data in
`meta['mmunorm']['config']`, read by :func:`load_folded`, and as text in `meta['cfg']`, which OpenMMLab's inferencers
execute. Without a config, :func:`load_folded` needs the model as it was before folding.
"""
from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import nn

from ..fusion.basis import is_layer_scale
from ..fusion.examples import with_plain_weights
from ..fusion.inner_tokens import refuse_inner_tokens, refuses_inner_tokens
from ..fusion.joint import join
from ..fusion.padding import Fill
from ..fusion.plan import FoldPlan, unwrapped
from ..fusion.reduced import Folded, TokenScale
from ..fusion.replaced import note_norms, noted_norms
from ..fusion.report import FusionReport
from ..fusion.rewrite import add_to_state, reduce_norm, replace_by_identity, replace_module
from ..norms import replace_norms
from ..registry import MODELS, lacks
from ..utils import PreflightError, check_module, whole_file, written_file
from .layouts import computed_tables

FOLDED_TYPE = 'FoldedModel'
TIMM_TYPE = 'TimmModel'
_MARK = '.folded'  # the buffer of a folded norm
# Attributes of modules that change what is computed, and that no tensor shows.
_SETTINGS = ('num_heads', 'stride', 'padding', 'dilation', 'groups', 'eps', 'global_pool', 'approximate')


def without_norms(model: nn.Module, folded: Sequence[str], made: Mapping[str, int],
                  reduced: Mapping[str, dict] | None = None, changed_streams: bool = False) -> nn.Module:
    """Changes a model in place to the structure of a folded model, so that a folded checkpoint loads; returns it.

    Args:
        model (nn.Module): a model of the same architecture, with any norms.
        folded (Sequence[str]): names of the folded norms.
        made (Mapping[str, int]): names and sizes of the tensors that folding added to the state_dict.
        reduced (Mapping[str, dict], optional): for each norm of which a scale stays, the arguments of its
            :class:`mmunorm.fusion.TokenScale`. Defaults to none.
        changed_streams (bool): whether residual streams are in another basis. Defaults to False.

    Raises:
        ValueError: the model lacks such norms, or such tensors cannot be added.
    """
    plan = FoldPlan(model)
    with_plain_weights(model)
    new = [name for name in made if not name.endswith('.pad_value')]
    for name in folded:
        if hasattr(plan.modules.get(name), 'without_factors'):
            replace_module(model, name, plan.modules[name].without_factors())
        elif name in (reduced or {}):
            reduce_norm(model, name, reduced[name], new)
        elif name in plan.norms or is_layer_scale(plan.modules.get(name)):
            replace_by_identity(model, name, new)
        else:
            is_folded = isinstance(plan.modules.get(name), Folded)
            raise ValueError(f'{type(model).__name__} has no norm {name}, which is folded in the checkpoint: it is '
                             f'{"folded already" if is_folded else "of another architecture"}')
    for name in new:
        add_to_state(model, name)
    for name in made.keys() - set(new):
        owner = name.rpartition('.')[0]
        if owner not in plan.fills:
            raise ValueError(f'{type(model).__name__}: no fold rule fills the padding of {owner}')
        plan.fills[owner](model.get_submodule(owner), Fill(next(model.parameters()).new_zeros(made[name])))
    if changed_streams:
        refuse_inner_tokens(model)
    return model


def folded_streams(checkpoint: dict | nn.Module) -> dict:
    """The arguments `reduced` and `changed_streams` of :func:`without_norms` for a folded model or its checkpoint."""
    if isinstance(checkpoint, nn.Module):
        reduced = {name: module.arguments for name, module in checkpoint.named_modules()
                   if isinstance(module, TokenScale)}
        return dict(reduced=reduced, changed_streams=refuses_inner_tokens(checkpoint))
    note = checkpoint.get('meta', {}).get('mmunorm', {})
    return {name: note[name] for name in ('reduced', 'changed_streams') if name in note}


def folded_made(checkpoint: dict | nn.Module) -> dict[str, int]:
    """The names and sizes of the tensors that folding added, of a folded model or its loaded checkpoint.

    Raises:
        PreflightError: the checkpoint lacks this information.
    """
    if isinstance(checkpoint, nn.Module):
        state = checkpoint.state_dict()
        names = [name for module in checkpoint.modules() if isinstance(module, Folded) for name in module.added]
        names += [name for name in state if name.endswith('.pad_value')]
        return {name: state[name].numel() for name in dict.fromkeys(names)}
    made = checkpoint.get('meta', {}).get('mmunorm', {}).get('made')
    if made is None or any(isinstance(size, list) for size in made.values()):
        raise PreflightError('this folded checkpoint lacks the names of the tensors that folding added: it is of an '
                             'older mmunorm, or was not written by save_folded(). Fold the trained checkpoint again '
                             'with tools/test.py --fuse --save')
    return made


def folded_norms(checkpoint: dict) -> list[str]:
    """The names of the folded norms in a loaded checkpoint; empty if it is not folded."""
    state_dict = checkpoint.get('state_dict', checkpoint)
    return [key.removesuffix(_MARK) for key in state_dict if key.endswith(_MARK)]


def save_folded(model: nn.Module, path: str | os.PathLike, cfg=None, report: FusionReport | None = None,
                meta: dict | None = None) -> None:
    """Writes the checkpoint of a folded model.

    Args:
        model (nn.Module): a model folded by `fuse_norms`. Names of wrappers, such as those of `torch.compile`,
            `DataParallel` and `AveragedModel`, are left out.
        path: path of the file, which is written atomically; symbolic links are kept.
        cfg (mmengine.Config, optional): the config of the model, folded or not, so that `load_folded(path)` needs no
            model. For a timm model, `cfg.model` is of type `TimmModel` with the `name` of the architecture and its
            arguments. Defaults to None: `load_folded` needs the model.
        report (FusionReport, optional): the result of `fuse_norms`, stored as a note.
        meta (dict, optional): the `meta` of the original checkpoint, such as its `dataset_meta`.

    Raises:
        TypeError: `model` is no module, or `path` is no path.
        ValueError: no norm of `model` is folded, or `cfg` has a value that is not plain data.
        PreflightError: `path` is there and is no regular file, such as a folder or a device.
    """
    check_module(model)
    path = written_file(_path(path, 'save_folded(model, path)'))
    model = unwrapped(model)
    state_dict = {_plain(name): value.cpu() if isinstance(value, torch.Tensor) else value
                  for name, value in model.state_dict().items()}
    names = folded_norms(state_dict)
    if not names:
        raise ValueError('model: none of its norms is folded; call mmunorm.fuse_norms(model) first')
    made = {_plain(name): size for name, size in folded_made(model).items()}
    streams = folded_streams(model)
    streams['reduced'] = {_plain(name): arguments for name, arguments in streams['reduced'].items()}
    note = dict(what='A model whose norms mmunorm folded into the adjacent layers.', made=made, **streams,
                settings=_settings(model),
                layers={_plain(layer): [*map(_plain, norms)] for layer, norms in noted_norms(model).items()})
    if report is not None:
        note.update(folded={fold.norm: fold.where for fold in (*report.folded, *report.reduced)},
                    kept={fold.norm: fold.where for fold in report.kept})
    meta = {**(meta or {}), 'mmunorm': note}
    if cfg is not None:
        from .plain import read_config_text
        cfg = copy.deepcopy(cfg)
        cfg.model = folded_config(cfg.model, names, made, **streams)
        if cfg.get('data_preprocessor') is not None:  # mmpretrain keeps it outside of the model
            cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
        meta['cfg'] = cfg.pretty_text
        note['config'] = read_config_text(meta['cfg'])
    path.parent.mkdir(parents=True, exist_ok=True)
    content = BytesIO()  # so that a full disk raises an OSError
    torch.save(dict(meta=meta, state_dict=state_dict), content)
    with whole_file(path) as part:
        part.write_bytes(content.getbuffer())


def load_folded(path: str | os.PathLike, model: nn.Module | None = None) -> nn.Module:
    """Loads the model of a folded checkpoint, in eval mode.

    No code in the file is executed, unless this is called inside `restricted(trusted=True)` of
    `mmunorm.checkpoints.unpickling`.

    Args:
        path: path of a file written by :func:`save_folded`.
        model (nn.Module, optional): a model of the same architecture, not folded, with any norms, such as timm's
            LayerNorms. It is changed in place, unless the file does not fit. Defaults to None: the model is built from
            the config in the file, with registered types only.

    Raises:
        TypeError: `path` is no path, or `model` is no module.
        ValueError: the file is no folded checkpoint, or one of another architecture; or it needs a model.
    """
    path = _path(path, 'load_folded(path, model)')
    if model is not None:
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
        model_names = {_plain(name): name for name, _ in inner.named_modules(remove_duplicate=False)}

        def in_model_names(named: Mapping) -> dict:
            return {join(model_names.get(owner, owner), last): value for name, value in named.items()
                    for owner, _, last in [name.rpartition('.')]}

        names, streams = folded_norms(checkpoint), folded_streams(checkpoint)
        reduced = {model_names.get(name, name): arguments for name, arguments in streams.pop('reduced', {}).items()}
        arguments = [model_names.get(name, name) for name in names], in_model_names(folded_made(checkpoint)), reduced
        checkpoint['state_dict'] = in_model_names(checkpoint['state_dict'])
        # A copy is tried first, so that a model that the file does not fit stays unchanged.
        for target in (copy.deepcopy(inner), inner):
            try:
                without_norms(target, *arguments, **streams)
                _load(target, checkpoint['state_dict'])
                _check_settings(target, checkpoint['meta']['mmunorm'])
            except (RuntimeError, AttributeError, ValueError) as error:
                raise ValueError(f'{path}: is of another architecture than {type(model).__name__}: {error}') from error
    else:
        if lacks('mmengine'):
            raise ValueError(f'{path}: without mmengine, load_folded needs the model: load_folded(path, model)')
        from .unpickling import restricted
        with restricted():
            checkpoint = torch.load(path, map_location='cpu')
            _check_folded(checkpoint, path)
            inner, model_names = _build(checkpoint['meta'], path), {}
            model = inner
        try:
            _load(model, checkpoint['state_dict'])
        except RuntimeError as error:
            raise ValueError(f'{path}: its config and its weights differ: {error}') from error
    layers, modules = checkpoint['meta']['mmunorm'].get('layers', {}), dict(inner.named_modules())
    named = {model_names.get(layer, layer): norms for layer, norms in layers.items()}
    note_norms(inner, {name: norms for name, norms in named.items() if name in modules})
    return model.eval()


def _settings(model: nn.Module) -> dict[str, dict]:
    """The settings of each module that has some, as plain data."""
    settings = {_plain(name): {key: vars(module)[key] for key in _SETTINGS
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


def _load(model: nn.Module, state_dict: Mapping) -> None:
    with computed_tables(model):
        model.load_state_dict(state_dict)


def _path(path: str | os.PathLike, call: str) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f'path: must be a path, got {type(path).__name__}; the arguments are {call}')
    return Path(path)


def _plain(name: str) -> str:
    """The name of a tensor or module in a model whose parts are not compiled."""
    return name.replace('_orig_mod.', '')


def _check_folded(checkpoint, path: str | os.PathLike) -> None:
    if not isinstance(checkpoint, dict) or 'mmunorm' not in checkpoint.get('meta', {}):
        raise ValueError(f'{path}: not a folded checkpoint; mmunorm.save_folded writes one')


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


def folded_config(model_cfg: dict, names: Sequence[str], made: Mapping[str, int], **streams) -> dict:
    """The model config that builds `model_cfg` with the norms `names` folded; `model_cfg` is unchanged.

    Initial weights are left out, because the folded checkpoint has all weights. `made` is :func:`folded_made`'s, and
    `streams` are those of :func:`folded_streams`.
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
    cfg.update(folded=list(names), made=dict(made), **streams)
    return cfg


def _plain_config(meta: dict, path: str | os.PathLike):
    """The config in a folded checkpoint. Older files have only the text."""
    from mmengine.config import Config

    from .plain import is_known_scope, read_config_text
    try:
        cfg = Config(meta['mmunorm'].get('config') or read_config_text(meta['cfg']))
    except ValueError as error:
        raise PreflightError(f'the config in the checkpoint {path} is code, which is not run: {error}. If you '
                             'trust its author, add --trust-checkpoint, or load it inside '
                             '`mmunorm.checkpoints.unpickling.restricted(trusted=True)`.') from None
    scope = cfg.get('default_scope', 'mmengine')
    if not is_known_scope(scope):
        raise ValueError(f'{path}: default_scope={scope!r} is not an OpenMMLab package; import a custom one first')
    return cfg


if not lacks('mmengine'):

    @MODELS.register_module(name=TIMM_TYPE)
    def timm_model(name: str, norm_cfg: dict | None = None, **kwargs) -> nn.Module:
        """Builds `timm.create_model(name, **kwargs)`, so that a folded checkpoint can describe it.

        `norm_cfg` (dict, optional) is the config of the norms that `replace_norms` replaces its norms by.
        """
        import timm
        model = timm.create_model(name, **kwargs)
        return model if norm_cfg is None else replace_norms(model, norm_cfg)

    @MODELS.register_module(name=FOLDED_TYPE)
    def folded_model(of: str, folded: Sequence[str], made: Mapping[str, int],
                     reduced: Mapping[str, dict] | None = None, changed_streams: bool = False, **cfg) -> nn.Module:
        """Builds the model of type `of` with the settings `cfg`, and folds its norms: see :func:`without_norms`."""
        return without_norms(MODELS.build(dict(type=of, **cfg)), folded, made, reduced, changed_streams)
