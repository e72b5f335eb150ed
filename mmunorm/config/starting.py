"""Initial weights of a training: `pretrained`, `init_cfg` and `load_from` take every layout of
:mod:`mmunorm.checkpoints.layouts`."""
from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.registry import MODELS
from torch import Tensor, nn

from ..checkpoints.layouts import find_weights, in_mmpretrain_names
from ..checkpoints.loading import read_checkpoint
from ..utils import PreflightError, whole_file
from .models import build_model, clear_build_errors
from .pretrained import pretrained_path

# Loading resizes these, or does not change them.
_RESIZED = ('relative_position_bias_table', 'pos_embed')


def fit_pretrained(cfg: Config) -> None:
    """Makes the checkpoints of the `init_cfg` of the model's parts ones that these can load, in place.

    A file in another layout is written once more, into the work directory, with the part's own names.
    """
    for name in [name for name, value in cfg.model.items() if isinstance(value, dict)]:
        _fit_part(cfg, name)


def _fit_part(cfg: Config, name: str) -> None:
    path, part = pretrained_path(cfg, name), cfg.model.get(name) or {}
    if path is None or '://' in path or 'type' not in part:
        return
    part = copy.deepcopy(part)
    part.pop('init_cfg')
    with clear_build_errors(), MODELS.switch_scope_and_registry(cfg.get('default_scope')) as registry:
        built = registry.build(part)
    content, prefix = read_checkpoint(path), cfg.model[name].init_cfg.get('prefix') or ''
    if type(built).__module__ == 'mmdet.models.backbones.swin':  # whose loader knows this prefix alone
        prefix = 'backbone.'
    model = nn.ModuleDict(dict(backbone=built))
    as_it_is = {f'backbone.{key}': value for key, value in _without(find_weights(content), prefix).items()}
    weights = _choose([*_candidates(content, model), as_it_is], model, f'{part.type} cannot start from {path}')
    if _num_fitting(as_it_is, model) == _num_fitting(weights, model) and not part.get('convert_weights'):
        return
    cfg.model[name].init_cfg = dict(type='Pretrained', prefix='backbone.',
                                    checkpoint=_write(cfg, f'pretrained_{name}', weights))
    if 'convert_weights' in part:  # from the official names
        cfg.model[name].convert_weights = False


def fit_load_from(cfg: Config) -> None:
    """Like :func:`fit_pretrained`, for the checkpoint of a whole model: `load_from` without `resume`."""
    path = cfg.get('load_from')
    if path is None or cfg.get('resume') or not os.path.isfile(path):
        return
    model, content = build_model(cfg), read_checkpoint(path)
    candidates = list(_candidates(content, model))
    weights = _choose(candidates, model, f'the model cannot start from load_from={path}')
    if weights is not candidates[0]:
        cfg.load_from = _write(cfg, 'load_from', weights)


def _candidates(content: dict, model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The weights of a file under the names that they may have in a model with a backbone."""
    weights = {name: value for name, value in find_weights(content).items() if isinstance(value, Tensor)}
    yield weights
    yield {f'backbone.{name}': value for name, value in weights.items()}
    if renamed := in_mmpretrain_names(content, model):
        yield renamed
    for prefix in sorted({name.partition('backbone.')[0] for name in weights if '.backbone.' in name}):
        yield _without(weights, prefix)  # of a student, a teacher or a wrapper


def _choose(candidates: list[dict[str, Tensor]], model: nn.Module, problem: str) -> dict[str, Tensor]:
    """The candidate that fits best; if none does, raises a PreflightError that describes the file."""
    best = max(candidates, key=lambda weights: _num_fitting(weights, model))
    if _num_fitting(best, model):
        return best
    name = next(iter(candidates[0]), None)
    if name is None:
        raise PreflightError(f'{problem}: there are no weights in it.')
    for weights in candidates:
        for key, wanted in _matrices(model):
            if key in weights and weights[key].shape != wanted.shape:
                raise PreflightError(f"{problem}: it is of another size: {key} is {_size(weights[key])}, and "
                                     f"{_size(wanted)} in the config's model. Name a checkpoint of that size.")
    raise PreflightError(
        f"{problem}: its names are unknown, such as {name}; the model's are such as {next(iter(model.state_dict()))}. "
        'A checkpoint of OpenMMLab with such a model would fit, and for a Swin, ViT, DeiT or T2T-ViT the official '
        "project's or timm's.")


def _without(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _num_fitting(weights: dict[str, Tensor], model: nn.Module) -> int:
    """How many of a model's matrices a file has; a file may lack a head, or have other layers."""
    return sum(name in weights and weights[name].shape == value.shape for name, value in _matrices(model))


def _matrices(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # By the names of checkpoints: mmpretrain's TimmClassifier leaves out a prefix there.
    return ((name, value) for name, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, nn.Parameter) and value.ndim > 1 and not name.endswith(_RESIZED))


def _size(value: Tensor) -> str:
    return ' x '.join(map(str, value.shape)) or '1'


def _write(cfg: Config, name: str, weights: dict[str, Tensor]) -> str:
    """Writes weights into the work directory; returns the path. Each process of a run does so, and all the same."""
    path = Path(cfg.work_dir, f'{name}.pth')
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        torch.save(dict(state_dict=weights), part)
    return str(path)
