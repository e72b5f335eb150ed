"""The checkpoint that a config's backbone starts from."""
from __future__ import annotations

from mmengine.config import Config

from ..utils import PreflightError


def pretrained_path(cfg: Config, part: str = 'backbone') -> str | None:
    """The checkpoint that the backbone of `cfg`, or another part of its model, starts from, or None."""
    model = cfg.get('model') or {}  # a Runner's config has none if it was given the model itself
    init_cfg = (model.get(part) or {}).get('init_cfg')
    if isinstance(init_cfg, dict) and init_cfg.get('type') == 'Pretrained':
        return init_cfg.checkpoint
    return None


def set_pretrained(cfg: Config, checkpoint: str | None) -> None:
    """Makes the backbone start from the checkpoint of a classifier; None for the backbone's own initialization."""
    if 'backbone' not in cfg.model:
        raise PreflightError('`pretrained` names backbone weights, but the model has no backbone.')
    if 'pretrained' in cfg:  # a dumped config sets its backbone from this variable again
        cfg.pretrained = checkpoint
    if checkpoint is None:
        cfg.model.backbone.pop('init_cfg', None)
    elif pretrained_path(cfg) is not None:
        cfg.model.backbone.init_cfg.checkpoint = checkpoint
    else:
        cfg.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=checkpoint, prefix='backbone.')
