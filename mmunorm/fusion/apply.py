"""Step 4 of folding: rewrites the layers adjacent to the norms of a plan, and removes the norms."""
from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from ..compat import forget_compiled_code
from .basis import NewNorm, apply_change, new_norms
from .examples import with_plain_weights
from .inner_tokens import refuse_inner_tokens
from .plan import FoldPlan
from .reduced import Folded
from .replaced import note_norms
from .rewrite import reduce_norm, rewrite


@torch.no_grad()
def apply(plan: FoldPlan, model: nn.Module) -> dict[str, NewNorm]:
    """Applies a plan in place to its model, or to a copy of it. Returns how each norm is folded, by name."""
    with_plain_weights(model)
    new_by_name = new_norms(plan)
    for fold in plan.folds.values():
        new = new_by_name.get(fold.norm)
        if not fold.obstacle:
            rewrite(model, fold, *new.affine, new.fill, new.arguments)
        elif new is not None and new.arguments is not None:
            reduce_norm(model, fold.norm, new.arguments, (), new.linear)
    for joint in plan.joints:
        if not joint.obstacle:
            joint.apply(model, plan)
    norms: dict[str, list[str]] = defaultdict(list)  # by the layer that they are folded into
    for fold in plan.folds.values():
        for site in fold.sites if not fold.obstacle else ():
            norms[site.layer].append(fold.norm)
    added = [name for change in plan.changes for name in apply_change(model, change, norms.keys())]
    if plan.changes:
        next(module for module in model.modules() if isinstance(module, Folded)).added += tuple(added)
        refuse_inner_tokens(model)
    note_norms(model, norms)
    forget_compiled_code()
    return new_by_name
