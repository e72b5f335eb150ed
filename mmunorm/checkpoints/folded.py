"""Saves and loads checkpoints of folded models.

It is an ordinary checkpoint with a note of what is left of each norm and of the tensors that folding added, and perhaps
a config of the model type `FoldedModel`, from which the tools and OpenMMLab's inferencers build its model. In its
state_dict, marks stand for the weights of folded norms, so that no loader puts it into a model with norms.
"""
from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from io import BytesIO
from operator import attrgetter
from pickle import UnpicklingError

import torch
from torch import nn

from ..compat import add_safe_globals, forget_compiled_code
from ..fusion.folds import StreamBasis, join
from ..fusion.layers import NOT_SAVED, Folded, FoldedAway, built
from ..fusion.padding import Fill
from ..fusion.plan import FoldPlan
from ..fusion.report import FusionReport
from ..fusion.rewrite import add_to_state, is_layer_scale, replace_module, set_streams, set_tensor, streams_of
from ..fusion.scopes import held_norms, hold, scopes_of, set_scopes
from ..modules import refuse_save_pretrained, uncompiled, unwrapped
from ..registry import MISSING, MODELS
from ..utils import check_module, whole_file, written_file
from .layouts import computed_tables

FOLDED_TYPE = 'FoldedModel'
_MARK, _PADDING = '.folded', '.pad_value'  # buffers of folded norms, and of modules that pad with a token
# Attributes of modules that change what is computed, and that no tensor shows.
_SETTINGS = ('num_heads', 'stride', 'padding', 'dilation', 'groups', 'eps', 'global_pool', 'approximate', 'shift_size')
_PROBE = torch.linspace(-3, 3, 7)  # shows what an activation computes


def without_norms(model: nn.Module, folding: Mapping[str, Mapping]) -> nn.Module:
    """Changes a model in place to the structure of a folded model, so that a folded checkpoint loads; returns it.

    `folding` is :func:`folding_of`'s: 'norms' has for each folded norm what is left of it, the arguments of
    `mmunorm.fusion.layers.built`; 'made' the names and sizes of the tensors that folding added to the state_dict;
    'scopes' the name of the module of each norm that has a scope, see `mmunorm.fusion.scopes`; and 'layers' the norms
    that were folded into each layer.

    Raises:
        ValueError: the model lacks such norms, or such tensors cannot be added.
    """
    plan, made = FoldPlan(model), folding['made']
    new = [name for name in made if not name.endswith(_PADDING)]
    for name, note in folding['norms'].items():
        module = plan.modules.get(name)
        if hasattr(module, 'without_factors'):
            replace_module(model, name, module.without_factors())
        elif name in plan.norms or is_layer_scale(module):
            like = next((tensor for tensor in (*module.parameters(), *model.parameters())), None)
            replace_module(model, name, built(**note, added=new, like=like))
        else:
            raise ValueError(f'{type(model).__name__} has no norm {name}, which is folded in the checkpoint: it is '
                             f'{"folded already" if isinstance(module, Folded) else "of another architecture"}')
    for name in new:
        if not add_to_state(model, name) and name.endswith('.weight'):  # shared with another layer
            set_tensor(model, name, attrgetter(name)(model).detach().clone())
    for name in made.keys() - set(new):
        owner = name.removesuffix(_PADDING)
        if owner not in plan.fills:
            raise ValueError(f'{type(model).__name__}: no fold rule fills the padding of {owner}')
        fill = Fill(next(model.parameters()).new_zeros(made[name]))
        replace_module(model, owner, plan.fills[owner](model.get_submodule(owner), fill))
    hold(model, folding['layers'])
    set_scopes(model, folding['scopes'])
    refuse_save_pretrained(model, lambda part: isinstance(part, Folded), NOT_SAVED)
    forget_compiled_code()
    return model


def folding_of(source: nn.Module | dict) -> dict:
    """What :func:`without_norms` needs, of a folded model or its loaded checkpoint; empty if it is not folded."""
    if not isinstance(source, nn.Module):
        note = source.get('meta', {}).get('mmunorm', {})
        return {key: note[key] for key in ('norms', 'made', 'scopes', 'layers') if 'norms' in note}
    state_dict, modules = source.state_dict(), dict(source.named_modules())
    folded = [name.removesuffix(_MARK) for name in state_dict if name.endswith(_MARK)]
    if not folded:
        return {}
    added = [name for part in modules.values() if isinstance(part, Folded) for name in part.added]
    added += [name for name in state_dict if name.endswith(_PADDING)]
    notes = {name: modules[name].note if isinstance(modules[name], Folded) else dict(kind='identity')
             for name in folded}
    return dict(norms=notes, made={name: state_dict[name].numel() for name in dict.fromkeys(added)},
                scopes=scopes_of(source), layers=held_norms(source))


def save_folded(model: nn.Module, path: str | os.PathLike, cfg=None, report: FusionReport | None = None,
                meta: dict | None = None) -> None:
    """Writes the checkpoint of a folded model.

    Args:
        model (nn.Module): a model folded by `fuse_norms`. Names of wrappers, such as those of `torch.compile`,
            `DataParallel` and `AveragedModel`, are left out.
        path: path of the file, which is written atomically; symbolic links are kept.
        cfg (mmengine.Config, optional): the config of the model, folded or not, from which OpenMMLab's inferencers
            build it. Defaults to None.
        report (FusionReport, optional): the result of `fuse_norms`, stored as a note.
        meta (dict, optional): the `meta` of the original checkpoint, such as its `dataset_meta`.

    Raises:
        TypeError: `model` is no module, or `path` is no path.
        ValueError: no norm of `model` is folded.
        PreflightError: `path` is there and is no regular file, such as a folder or a device.
    """
    check_module(model)
    path = written_file(path)
    model = unwrapped(model)
    with uncompiled(model):
        structure = folding_of(model)
        if not structure:
            raise ValueError('model: none of its norms is folded; call mmunorm.fuse_norms(model) first')
        state_dict = {name: value.cpu() if isinstance(value, torch.Tensor) else value
                      for name, value in model.state_dict().items()}
        note = dict(structure, what='A model whose norms mmunorm folded into the adjacent layers.',
                    settings=_settings(model), streams=[*map(vars, streams_of(model))])
    if add_safe_globals is not list:  # before torch 2.4, a file can have no such mark
        state_dict.update({f'{name}.weight': FoldedAway() for name in structure['norms']
                           if isinstance(model.get_submodule(name), Folded)})
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
    """Loads the weights of a folded checkpoint, in eval mode. No code in the file is executed.

    Args:
        path: path of a file written by :func:`save_folded`.
        model (nn.Module): a model of the same architecture, not folded, with any norms, such as timm's LayerNorms. It
            is changed in place, unless the file does not fit.

    Raises:
        TypeError: `model` is no module.
        ValueError: the file is no folded checkpoint, or one of a model that computes something else.
    """
    check_module(model)
    add_safe_globals([FoldedAway])
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except (KeyError, EOFError, UnpicklingError) as error:
        raise ValueError(f'{path}: not a checkpoint ({type(error).__name__}: {error})') from error
    if not isinstance(checkpoint, dict) or 'norms' not in checkpoint.get('meta', {}).get('mmunorm', {}):
        raise ValueError(f'{path}: not a folded checkpoint; mmunorm.save_folded writes one')
    inner = unwrapped(model)
    if any(parameter.is_meta for parameter in inner.parameters()):  # torch would only warn
        raise ValueError('model: it is on the meta device; call model.to_empty(device="cpu") first')
    note = checkpoint['meta']['mmunorm']
    with uncompiled(inner):
        # A copy is tried first, so that a model that the file does not fit stays unchanged.
        for target in (copy.deepcopy(inner), inner):
            try:
                without_norms(target, folding_of(checkpoint))
                with computed_tables(target):
                    target.load_state_dict(checkpoint['state_dict'])
                set_streams(target, [StreamBasis(**stream) for stream in note['streams']])
                _check_settings(target, note['settings'])
            except (RuntimeError, AttributeError, ValueError) as error:
                raise ValueError(f'{path}: is of another architecture than {type(model).__name__}: {error}') from error
    return model.eval()


def _settings(model: nn.Module) -> dict[str, dict]:
    """The settings of each module that has some, as plain data, and what activations make of some numbers."""
    settings = {}
    for name, module in model.named_modules():
        found = {key: vars(module)[key] for key in _SETTINGS
                 if isinstance(vars(module).get(key), (bool, int, float, str, tuple))}
        functions = {key: value for key, value in vars(module).items() if key.startswith('act')}
        if not any(True for _ in (*module.children(), *module.parameters(), *module.buffers())):
            functions['forward'] = module
        found.update((key, made) for key, function in functions.items() if (made := _made_of_probe(function)))
        if found:
            settings[name] = found
    return settings


def _made_of_probe(function) -> list[float]:
    """What an activation makes of some numbers; empty if it is none, or the identity."""
    if not callable(function) or isinstance(function, type):
        return []
    try:
        made = function(_PROBE.clone())
    except Exception:
        return []
    is_other = isinstance(made, torch.Tensor) and made.shape == _PROBE.shape and not torch.equal(made, _PROBE)
    return [round(value, 4) for value in made.tolist()] if is_other else []


def _check_settings(model: nn.Module, expected: Mapping[str, Mapping]) -> None:
    """Raises a ValueError if modules have other settings than in the folded model."""
    settings = _settings(model)
    for name, values in expected.items():
        for key, value in values.items():
            if name in settings and settings[name].get(key) != value:
                raise ValueError(f'{join(name, key)} is {value!r} in the file and {settings[name].get(key)!r} in the '
                                 'model')


def folded_config(model_cfg: dict, folding: Mapping) -> dict:
    """The model config that builds `model_cfg` folded; `folding` is :func:`folding_of`'s. `model_cfg` is unchanged.

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
    cfg.folding = folding
    return cfg


if 'mmengine' not in MISSING:

    @MODELS.register_module(name=FOLDED_TYPE)
    def folded_model(of: str | dict, folding: Mapping[str, Mapping], **cfg) -> nn.Module:
        """Builds the model `of`, a type or a dict with settings of its own, with `cfg`; see :func:`without_norms`."""
        of = of if isinstance(of, dict) else dict(type=of)
        return without_norms(MODELS.build({**cfg, **of}), folding)
