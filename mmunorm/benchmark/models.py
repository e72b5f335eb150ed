"""The compared models: LN, LN folded exactly, the config's norm, the same folded, and norm-free."""
from __future__ import annotations

import copy
import logging

import torch
from mmengine.config import Config
from torch import nn

from ..checkpoints.loading import load_weights
from ..config.models import build_model
from ..config.presets import layer_norm_config
from ..config.pretrained import pretrained_path, set_pretrained
from ..fusion import FusionReport, fuse_norms
from ..modules import replace_modules
from ..norms.base import DEFAULT_NORM_CFG
from ..norms.layers import is_norm, norm_layers
from ..utils import PreflightError

LN = 'LN'
EXACT = 'exact'  # LN, folded exactly: norms without weights are left
NORM_FREE = 'norm-free'


def norm_name(cfg: Config) -> str:
    """The type of the backbone's norm. Raises a PreflightError without a backbone."""
    if 'backbone' not in cfg.model:
        raise PreflightError('the model of the config has no backbone with norms to fold.')
    holder = cfg.model if 'converted' in cfg.model else cfg.model.backbone
    return (holder.get('norm_cfg') or DEFAULT_NORM_CFG)['type']


def folded_name(name: str) -> str:
    """The row of the folded model whose norm is `name`."""
    return EXACT if name == LN else f'{name} folded'


def build_models(cfg: Config, checkpoint: str | None = None, seed: int = 0
                 ) -> tuple[dict[str, nn.Module], FusionReport, dict]:
    """The compared models by name, the report on the config's norm, and `meta` of the checkpoint.

    The models are in eval mode on the CPU, with the same weights outside their norms: 'LN', 'exact' (LN, folded
    exactly), the config's norm, that name with ' folded', and 'norm-free', where every norm is an Identity. With LN as
    the config's norm there are three. Without a checkpoint, weights are initialized as for training, and every norm
    gets random statistics and a random affine part. A PreflightError if the config is invalid, or the checkpoint does
    not fit.
    """
    name = norm_name(cfg)
    cfg = copy.deepcopy(cfg)
    if pretrained_path(cfg) is not None:
        set_pretrained(cfg, None)
    torch.manual_seed(seed)
    model = build_model(cfg).eval()
    meta = {}
    if checkpoint is None:
        logging.disable(logging.INFO)  # mmengine logs every parameter
        model.init_weights()
        logging.disable(logging.NOTSET)
        randomize_norms(model, torch.Generator().manual_seed(seed))
    else:
        meta = load_weights(model, checkpoint)

    cfg.model = layer_norm_config(cfg.model, dict(type=LN))
    layer_norm = build_model(cfg).eval()
    # Copies by name, including the affine parts. Only the statistics have no counterpart.
    layer_norm.load_state_dict(model.state_dict(), strict=False)
    rows, reports = {}, {}
    for norm, plain in {LN: layer_norm, name: model}.items():
        rows[norm], rows[folded_name(norm)] = plain, copy.deepcopy(plain)
        reports[norm] = fuse_norms(rows[folded_name(norm)])
    rows[NORM_FREE] = replace_modules(copy.deepcopy(model), is_norm, lambda norm: nn.Identity())
    return rows, reports[name], meta


@torch.no_grad()
def randomize_norms(model: nn.Module, generator: torch.Generator) -> None:
    """Gives every norm of a model random statistics and a random affine part, in place.

    As after training, no weight is zero, for which a folded window attention needs an extra copy of its map.
    """
    def draw(tensor: torch.Tensor, make=torch.randn) -> torch.Tensor:
        return make(tensor.shape, generator=generator).to(tensor)

    for _, norm in norm_layers(model):
        for name, tensor in [*norm.named_parameters(recurse=False), *norm.named_buffers(recurse=False)]:
            if name == 'weight':
                tensor.copy_(draw(tensor).mul(0.3).add(1).abs().clamp(min=0.01))
                tensor[draw(tensor, torch.rand) < 0.1] *= -1
            elif name in ('bias', 'running_mean'):
                tensor.copy_(draw(tensor).mul(0.3))
            elif name == 'running_var':
                tensor.copy_(draw(tensor).mul(0.5).exp())
