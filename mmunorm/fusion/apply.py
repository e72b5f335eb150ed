"""Step 4 of folding: rewrites the layers adjacent to the norms of a plan, and removes the norms."""
from __future__ import annotations

import torch
from torch import nn

from .basis import apply_change, new_norms
from .check import layer_obstacle
from .examples import with_plain_weights
from .inner_tokens import refuse_inner_tokens
from .plan import FoldPlan, call_obstacle
from .reduced import Folded
from .replaced import note_folds
from .report import Site, streams_of
from .rewrite import absorb, reduce_norm, rewrite
from .streams import factor, fold_stream, leave_residual


@torch.no_grad()
def apply(plan: FoldPlan, model: nn.Module) -> None:
    """Applies a plan in place to its model, or to a copy of it."""
    with_plain_weights(model)
    folds = [fold for fold in plan.folds if not fold.obstacle]
    carried = {}
    for stream in streams_of(folds):
        carried.update(fold_stream(model, plan, stream))
    news = new_norms(plan, plan.changes)
    for fold in plan.folds:
        new = news.get(fold.norm)
        if not fold.obstacle:
            rewrite(model, fold, *carried.get(fold.norm) or new.affine, new.fill, new.arguments)
        elif new is not None and new.arguments is not None:
            reduce_norm(model, fold.norm, new.arguments, (), new.linear)
    covered = {site.layer for fold in folds for site in fold.sites}
    made = [name for change in plan.changes for name in apply_change(model, change, covered)]
    if plan.changes:
        next(module for module in model.modules() if isinstance(module, Folded)).made += tuple(made)
        refuse_inner_tokens(model)
    note_folds(model, folds)
    _fold_factors(model, plan)


def _fold_factors(model: nn.Module, plan: FoldPlan) -> None:
    """Folds the factor b of each connection, such as LayerScale's, into the last layer of F if the sum consumes it.

    If a norm between the layer and the sum was kept, b is kept too.
    """
    for residual, last, between in plan.factors:
        layer, b = model.get_submodule(last), plan.modules[residual].scales()[1]
        is_next = all(isinstance(model.get_submodule(name), nn.Identity) for name in between)
        if not is_next or call_obstacle(plan.modules[residual]) or layer_obstacle(layer) or plan.owners.others(
                last, plan.modules[last]):
            continue
        like = torch.ones(layer.out_features, dtype=torch.float64, device=layer.weight.device)
        absorb(model, Site(last, after=True), factor(b, like), torch.zeros_like(like))
        leave_residual(model, residual)
