"""Configs and checkpoints of converted models."""
from __future__ import annotations

import copy
import json
import os
from pathlib import Path

from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import save_checkpoint, weights_to_cpu
from mmpretrain.models import SwinTransformer
from mmpretrain.models.classifiers import BaseClassifier
from torch import nn

from ..config.models import build_model
from ..config.presets import REPLACED_TYPE, parse_preset, replace_norm_cfgs, replaced_norms, with_frozen_means
from ..norms import OfflineNorm
from ..norms.replace import layer_norms
from ..utils import PreflightError, whole_file, write_text
from .convert import ConversionError, build_target
from .report import ConversionReport

converted_model = replaced_norms  # an older name, for one release


def parse_goal(text: str) -> tuple[str, dict]:
    """The name and the config of the norm given by `--to`. It keeps the statistics of the conversion images.

    Raises:
        PreflightError: the norm is unknown, or a LayerNorm cannot be converted to it.
    """
    name, norm_cfg = parse_preset(text)
    norm_cfg = with_frozen_means(norm_cfg)
    try:
        build_target(norm_cfg, nn.LayerNorm(1), nn.Module())
    except KeyError:
        raise PreflightError(f'--to {text}: there is no norm of type {norm_cfg["type"]!r}.') from None
    except ConversionError as error:
        raise PreflightError(f'--to {text}: {error}.') from error
    return name, norm_cfg


def check_converted(folder: str | os.PathLike, name: str, checkpoint: str) -> None:
    """Checks that :func:`save_converted` would only overwrite its own files.

    Raises:
        PreflightError: it would overwrite another file.
    """
    paths = [Path(folder, f'{name}.{suffix}') for suffix in ('pth', 'py')]
    if os.path.realpath(paths[0]) == os.path.realpath(checkpoint):
        raise PreflightError(f'--out {folder}: {paths[0]} is the checkpoint to convert; choose another folder.')
    for path in paths:
        if path.exists() and not path.with_suffix('.json').exists():
            raise PreflightError(f'--out {folder}: {path} is not from a conversion; choose another folder.')


def converted_config(cfg: Config, model: nn.Module, report: ConversionReport, norm_cfg: dict,
                     teacher: str) -> Config:
    """The config of a converted model; `cfg` is unchanged.

    If `norm_cfg` of the backbone can describe all norms, it is set there; mmpretrain's Swin, which does not pass it to
    all of its norms, becomes `UNSwinTransformer`. Otherwise, for example if norms are kept, the model's type becomes
    `ReplacedNorms`, with a list of the converted norms. It is trained by distillation from the LayerNorm model.

    Args:
        cfg (Config): config of the model with LayerNorm; `teacher` (str) is its checkpoint.
        model (nn.Module): the converted model; `report` (ConversionReport) is the result of `convert_norms`.
    """
    new = copy.deepcopy(cfg)
    new.pop('pretrained', None)
    imports = new.get('custom_imports') or dict(imports=[], allow_failed_imports=False)
    listed = [imports['imports']] if isinstance(imports['imports'], str) else imports['imports']
    new.custom_imports = {**imports, 'imports': list(dict.fromkeys([*listed, 'mmunorm']))}
    if isinstance(new.model.get('backbone'), dict) or isinstance(model, BaseClassifier):
        eps = next(iter(layer_norms(build_model(cfg)).values())).eps
        layer_norm = dict(type='LN') if eps == 1e-5 else dict(type='LN', eps=eps)
        new.custom_hooks = [*(new.get('custom_hooks') or []), dict(
            type='DistillationHook', checkpoint=teacher, norm_cfg=layer_norm)]
    if isinstance(new.model.get('backbone'), dict):
        new.model.backbone.init_cfg = None  # the checkpoint has all weights
        with MODELS.switch_scope_and_registry(cfg.get('default_scope')) as registry:
            if registry.get(new.model.backbone.type) is SwinTransformer:
                new.model.backbone.type = 'UNSwinTransformer'
        new.model.backbone = replace_norm_cfgs(new.model.backbone, norm_cfg)
        if not report.kept and _is_same(new, model):
            return new
    converted = {model.get_submodule(norm.norm) for norm in report.converted}
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module in converted]
    new.model = ConfigDict({**copy.deepcopy(cfg.model), 'type': REPLACED_TYPE, 'of': cfg.model.type,
                            'norm_cfg': dict(norm_cfg), 'converted': names})
    if isinstance(new.model.get('backbone'), dict):
        new.model.backbone.init_cfg = None
    return new


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


def _is_same(cfg: Config, model: nn.Module) -> bool:
    """Whether a config builds a model with these norms and weights."""
    try:
        built = build_model(cfg)
    except TypeError:  # the backbone has no norm_cfg
        return False

    def parts(model: nn.Module) -> dict:
        norms = {name: (type(norm), norm.eps) for name, norm in model.named_modules()
                 if isinstance(norm, (OfflineNorm, nn.LayerNorm))}
        return {**norms, **{name: value.shape for name, value in model.state_dict().items()}}

    return parts(built) == parts(model)


def save_converted(model: nn.Module, cfg: Config, report: ConversionReport, folder: str | os.PathLike, name: str,
                   meta: dict | None = None) -> list[Path]:
    """Writes checkpoint, config, and the report as Markdown and JSON, each file atomically.

    Args:
        model (nn.Module): the converted model; `report` (ConversionReport) is the result of `convert_norms`.
        cfg (Config): the result of :func:`converted_config`; the written config loads the checkpoint.
        folder: output folder, created if missing. `name` (str) is the name of the files, without suffix.
        meta (dict, optional): the `meta` of the original checkpoint, such as its `dataset_meta`.

    Returns:
        The paths.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, config, table, data = (folder / f'{name}.{suffix}' for suffix in ('pth', 'py', 'md', 'json'))
    cfg = copy.deepcopy(cfg)
    cfg.load_from = str(checkpoint)
    kept = {key: value for key, value in (meta or {}).items() if key == 'dataset_meta'}
    with whole_file(checkpoint) as part:
        save_checkpoint(dict(meta={**kept, 'cfg': cfg.pretty_text}, state_dict=weights_to_cpu(model.state_dict())),
                        str(part))
    write_text(config, cfg.pretty_text)
    write_text(table, report.markdown())
    write_text(data, json.dumps(report.as_dict(), indent=2))
    return [checkpoint, config, table, data]
