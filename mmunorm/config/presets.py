"""The norms of a config: `--norm NAME` of the tools, from the name to the `norm_cfg`."""
from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner
from torch import nn

from .. import norms
from ..norms import replace_norms
from ..utils import PreflightError
from .pretrained import pretrained_path

NORMS = {
    'LN': dict(type='LN'),
    'BN': dict(type='TokenBN'),
    'PN*': dict(type='PN', layer_scale=False),  # PowerNorm without its scale of each token
    'UN+': dict(type='UN', centered=True, eta=0.),  # not the paper's: docs/results/accuracy.md
    'UN-nofilter': dict(type='UN', outlier_filter=False),
    **{name: dict(type=name) for name in norms.TOKEN_NORMS if name not in ('SyncUN', 'TokenBN')},
}
REPLACED_TYPE = 'ReplacedNorms'
HELP = f'{", ".join(NORMS)}, or NAME=TYPE,argument=value,... (quote PN*)'


def parse_preset(text: str, presets: Mapping[str, dict] = NORMS, what: str = 'norm') -> tuple[str, dict]:
    """A name among `presets`, or `NAME=TYPE,argument=value,...`, as a name and a config; `what` is for errors."""
    if '=' not in text:
        if text not in presets:
            raise PreflightError(f'there is no {what} {text!r}: it must be one of {", ".join(presets)}, '
                                 'or NAME=TYPE,argument=value,...')
        return text, dict(presets[text])
    name, _, settings = text.partition('=')
    kind, *arguments = re.split(r',(?![^([]*[)\]])', settings)  # at commas outside brackets
    pairs = [argument.partition('=') for argument in arguments]
    if not name or not kind or not all(equals and key.isidentifier() for key, equals, _ in pairs):
        raise PreflightError(f'a {what} of your own is NAME=TYPE,argument=value,..., got {text!r}.')
    cfg = dict(type=kind)
    for key, _, value in pairs:
        try:
            cfg[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            cfg[key] = value
    return name, cfg


def slug(name: str) -> str:
    """A norm's name as a part of the name of a folder: `pn_star` for `PN*`."""
    return re.sub(r'^\.+|[^a-z0-9.-]+', '_', name.lower().replace('*', '_star').replace('+', '_plus'))


def apply_norm(cfg: Config, text: str, options: Mapping | None = None) -> None:
    """Sets another norm in a recipe, in place: all that `--norm` does.

    The checkpoints that its parts start from follow where their folders are named after the config's norm:
    `work_dirs/swin_t_un_imagenet` becomes `work_dirs/swin_t_bn_imagenet`. So does the work directory if the config has
    none. Paths that `options`, the `--cfg-options` already merged into `cfg`, set do not change.
    """
    name, norm_cfg = parse_preset(text)
    options, parts = options or {}, _parts(cfg)
    old = (cfg.model[parts[0]].get('norm_cfg') or dict(type='LN'))['type'] if parts else ''
    for part in parts:
        path = pretrained_path(cfg, part)
        named = any(key.startswith(f'model.{part}.init_cfg') or key == 'pretrained' and part == 'backbone'
                    for key in options)
        if path is not None and '://' not in path and not named:
            folder = Path(path).parent
            path = str(folder.parent / _renamed(folder.name, old, name) / Path(path).name)
            cfg.model[part].init_cfg.checkpoint = path
            if part == 'backbone' and 'pretrained' in cfg:
                cfg.pretrained = path
    set_norm(cfg, norm_cfg)
    if cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs', renamed(Path(cfg.filename).stem, old, name)))


def set_norm(cfg: Config, norm_cfg: dict) -> None:
    """Sets the `norm_cfg` of every norm of the backbone, and of other parts with norms of ours, in place.

    A norm of the type that the config has inherits its arguments. A norm of another type keeps its own defaults, except
    that `warmup_iters` is kept.
    A stock backbone becomes one of type `ReplacedNorms`, because many pass `norm_cfg` to only some of their norms.
    """
    if 'converted' in cfg.model:
        raise PreflightError(f'{cfg.filename or "the config"} lists which of its LayerNorms are converted to '
                             f'{cfg.model.norm_cfg.type}: for another norm, convert the model with LayerNorm to that.')
    parts = _parts(cfg)
    if not parts:
        raise PreflightError(f'{cfg.filename or "the config"} has no model.backbone to put a norm into.')
    cls = MODELS.get(norm_cfg['type'])
    if cls is None:
        raise PreflightError(f'there is no norm of type {norm_cfg["type"]!r} among the registered layers.')
    accepted = inspect.signature(cls).parameters
    for part in parts:
        base = cfg.model[part].get('norm_cfg') or dict(type='LN')
        inherited = base if base['type'] == norm_cfg['type'] else {
            key: base[key] for key in ('warmup_iters', ) if key in base and key in accepted}
        complete = {**inherited, **norm_cfg}
        if _passes_norm_cfg_on(cfg, part):
            cfg.model[part] = replace_norm_cfgs(cfg.model[part], complete)
        elif norm_cfg['type'] != 'LN' or not base['type'].startswith('LN'):
            kind = cfg.model[part].get('of', cfg.model[part].type)
            cfg.model[part] = {**cfg.model[part], 'type': REPLACED_TYPE, 'of': kind, 'norm_cfg': complete}


@MODELS.register_module(name=REPLACED_TYPE)
def replaced_norms(of: str, norm_cfg: dict, converted: Sequence[str] | None = None, **cfg) -> nn.Module:
    """Builds a model of type `of` with the settings `cfg`, and replaces its LayerNorms by norms of `norm_cfg`.

    `converted` (Sequence[str], optional) are the full names of those to replace. Defaults to None: all.
    """
    model = MODELS.build(dict(type=of, **cfg))
    return model if norm_cfg['type'] == 'LN' else replace_norms(model, norm_cfg, converted)


def use_map_forms(cfg: Config) -> None:
    """Makes UN2d of UN, and so on, where the backbone has its norms over maps `(N, C, H, W)`, as ConvNeXt; in place."""
    backbone = cfg.model.get('backbone') or {}
    norm_cfg = backbone.get('norm_cfg')
    if not isinstance(norm_cfg, dict) or f'{norm_cfg.get("type")}2d' not in MODELS:
        return
    argument = inspect.signature(_class_of(cfg, backbone)).parameters.get('norm_cfg')
    if argument and isinstance(argument.default, dict) and argument.default['type'] == 'LN2d':
        norm_cfg['type'] += '2d'


def _parts(cfg: Config) -> list[str]:
    """The parts of a model whose norms `--norm` sets: the backbone, and what its class names in `norm_parts`."""
    parts = ('backbone', *getattr(_class_of(cfg, cfg.model), 'norm_parts', ()))
    return [part for part in parts if 'norm_cfg' in (cfg.model.get(part) or {})
            or part in cfg.model and not _passes_norm_cfg_on(cfg, part)]


def _passes_norm_cfg_on(cfg: Config, part: str) -> bool:
    """Whether a part of the model passes `norm_cfg` on to each of its norms; stock ones often do not."""
    package = _class_of(cfg, cfg.model[part]).__module__.partition('.')[0]
    return cfg.model[part].get('type') != REPLACED_TYPE and package not in ('mmdet', 'mmpretrain')


def _class_of(cfg: Config, part: dict) -> Callable:
    kind = part.get('type')
    with MODELS.switch_scope_and_registry(cfg.get('default_scope')) as registry:
        return (registry.get(kind) if isinstance(kind, str) else kind) or nn.Module


def replace_norm_cfgs(backbone: dict, norm_cfg: dict) -> dict:
    """The config of a backbone with `norm_cfg` wherever it names a norm, and at its top."""
    def replace(value):
        if isinstance(value, dict):
            return type(value)({
                key: dict(norm_cfg) if key.endswith('norm_cfg') and isinstance(inner, dict) else replace(inner)
                for key, inner in value.items()})
        return [replace(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    return type(backbone)({'norm_cfg': dict(norm_cfg), **replace(backbone)})


def layer_norm_config(model_cfg: dict, norm_cfg: dict) -> ConfigDict:
    """The config of the model with LayerNorm, given the config of a converted one, which is unchanged.

    `model_cfg` lists its converted norms, or has a backbone that accepts `norm_cfg`; else raises a PreflightError.
    """
    cfg = ConfigDict(copy.deepcopy(model_cfg))
    if 'converted' in cfg:
        cfg.type = cfg.pop('of')
        del cfg['norm_cfg'], cfg['converted']
    elif isinstance(cfg.get('backbone'), dict):
        cfg.backbone = replace_norm_cfgs(cfg.backbone, norm_cfg)
    else:
        raise PreflightError('the model has no backbone with norms to replace by LayerNorm.')
    if isinstance(cfg.get('backbone'), dict):
        cfg.backbone.init_cfg = None
    return cfg


def renamed(stem: str, old: str, name: str) -> str:
    """The name of a recipe with the norm `name` in place of `old`: `swin_t_bn_imagenet` of `swin_t_un_imagenet`."""
    new = _renamed(stem, old, name)
    return f'{stem}_{slug(name)}' if new == stem and slug(name) != old.lower() else new


def _renamed(stem: str, old: str, name: str) -> str:
    return re.sub(rf'_{re.escape(old.lower())}(?=_|$)', f'_{slug(name)}', stem)


def count_steps(cfg: Config) -> int:
    """Training steps of a whole run. Where it counts epochs, its data must be there."""
    if 'max_iters' in cfg.train_cfg:
        return cfg.train_cfg.max_iters
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    loader = {**cfg.train_dataloader, 'num_workers': 0, 'persistent_workers': False}
    try:
        return cfg.train_cfg.max_epochs * len(Runner.build_dataloader(loader))
    except OSError as error:
        raise PreflightError(f'the steps of the run cannot be counted without its training data ({error}).') from error
