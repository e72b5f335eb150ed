"""Folding of the factors of residual schemes, such as LayerScale's, into the layers before them."""
from __future__ import annotations

import torch
from torch import nn

from ..residuals import ResidualLayer
from ..residuals.sublayer import describe
from .check import Owners, call_obstacle, layer_obstacle
from .report import Site
from .rewrite import absorb
from .streams import factor, leave_residual


def fold_scales(model: nn.Module) -> None:
    """Takes b of each connection into the last layer of F, in place, wherever the sum reads that layer.

    Where a norm stands after the sum it has stayed, and so does b.
    """
    names, owners = {id(module): name for name, module in model.named_modules()}, Owners(model)
    # All of them first: ReZero's connections share theirs.
    found = [(getattr(layer, residual), describe(getattr(layer, part)), getattr(layer, norm),
              getattr(layer, residual).scales()[1])
             for layer in model.modules() if isinstance(layer, ResidualLayer)
             for residual, part, norm in layer.sublayers()]
    for residual, sublayer, norm, b in found:
        last, name = sublayer.last, names[id(sublayer.last)]
        between = [residual.norm, *([norm] if residual.norm_at == 'mid' else [])]
        is_plain = sublayer.is_plain_behind_last and all(isinstance(module, nn.Identity) for module in between)
        if b is None or residual.norm_at == 'post' or not is_plain or call_obstacle(residual) or layer_obstacle(
                last, last.out_features, after=True) or owners.others(name, last):
            continue
        like = torch.ones(last.out_features, dtype=torch.float64, device=last.weight.device)
        absorb(model, Site(name, after=True), factor(b, like), torch.zeros_like(like))
        leave_residual(model, names[id(residual)])
