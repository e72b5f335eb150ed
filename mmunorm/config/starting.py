"""Initial weights of a run, in every layout of `..checkpoints.layouts`: `init_cfg`, `pretrained` and `load_from`."""
from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.registry import MODELS
from torch import Tensor, nn

from ..checkpoints.layouts import find_weights, weights_for
from ..checkpoints.loading import check_fits, num_fitting, read_checkpoint
from ..checkpoints.reading import is_trusted
from ..utils import PreflightError, whole_file
from .models import build_model, clear_build_errors
from .pretrained import pretrained_path


def fit_pretrained(cfg: Config) -> None:
    """Makes the checkpoints of the `init_cfg` of the model's parts ones that these can load, in place.

    A file in another layout is written once more, into the work directory, with the names of mmpretrain. A
    PreflightError if a file has no weight of the part.
    """
    for name in [name for name, value in cfg.model.items() if isinstance(value, dict)]:
        path, part = pretrained_path(cfg, name), cfg.model[name]
        if path is not None and '://' not in path and 'type' in part:
            _fit_part(cfg, name, path)


def _fit_part(cfg: Config, name: str, path: str) -> None:
    part = copy.deepcopy(cfg.model[name])
    prefix = part.pop('init_cfg').get('prefix') or ''
    with clear_build_errors(), MODELS.switch_scope_and_registry(cfg.get('default_scope')) as registry:
        built = registry.build(part)
    if type(built).__module__ == 'mmdet.models.backbones.swin':  # whose loader knows this prefix alone
        prefix = 'backbone.'
    model, content = nn.ModuleDict(dict(backbone=built)), read_checkpoint(path)
    weights = find_weights(content)
    named = [{f'backbone.{key.removeprefix(start)}': value for key, value in weights.items() if key.startswith(start)}
             for start in (prefix, '')]  # with the prefix, or of the part alone
    if num_fitting(model, named[0]) and _is_readable(path, content, weights) and not part.get('convert_weights'):
        return
    weights = next((found for found in named if num_fitting(model, found)), None) or weights_for(model, content)
    check_fits(model, weights, path)
    cfg.model[name].init_cfg = dict(type='Pretrained', prefix='backbone.',
                                    checkpoint=_write(cfg, f'pretrained_{name}', weights))
    if 'convert_weights' in part:  # from the official names
        cfg.model[name].convert_weights = False


def fit_load_from(cfg: Config) -> None:
    """Like :func:`fit_pretrained`, for the checkpoint of a whole model: `load_from` without `resume`.

    A PreflightError if the file has no weight of the model, or `resume` would run the text of a config in it.
    """
    path = cfg.get('load_from')
    if path is None or os.path.isdir(path):
        return
    if cfg.get('resume'):
        if 'config' in (read_checkpoint(path).get('meta') or {}) and not is_trusted():
            raise PreflightError(f'{path} is of an older mmdet or mmcls: mmengine would run the config in it as code. '
                                 f'To start from its weights, add --cfg-options load_from={path}.')
        return
    if '://' in path:
        return
    model, content = build_model(cfg), read_checkpoint(path)
    weights = weights_for(model, content)
    check_fits(model, weights, path)
    if not _is_readable(path, content, weights):
        cfg.load_from = _write(cfg, 'load_from', weights)


def _is_readable(path: str, content: dict, weights: dict[str, Tensor]) -> bool:
    """Whether mmengine's loaders take these weights from a file with this content."""
    held = content.get('state_dict', content)
    return (not path.endswith('.safetensors') and held.keys() == weights.keys()
            and all(held[name] is value for name, value in weights.items()))


def _write(cfg: Config, name: str, weights: dict[str, Tensor]) -> str:
    """Writes weights into the work directory; returns the path. Each process of a run does so, and all the same."""
    path = Path(cfg.work_dir, f'{name}.pth')
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        torch.save(dict(state_dict=weights), part)
    return str(path)
