"""Step 4 of folding: rewrites the layers adjacent to the norms of a plan, and removes the norms."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from os.path import commonprefix

import torch
from torch import nn

from ..compat import forget_compiled_code
from .basis import NewNorm, apply_change, new_norms
from .examples import with_plain_weights
from .partial_calls import WHOLE, set_scopes
from .plan import FoldPlan
from .reduced import Folded, StreamBasis, refuse_save_pretrained, set_streams
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
    set_streams(model, [StreamBasis(**{field.name: getattr(change, field.name) for field in fields(StreamBasis)})
                        for change in plan.changes])
    whole = WHOLE if 'forward' in plan.methods else ()
    set_scopes(model, _scopes(plan), tuple(dict.fromkeys((*whole, *plan.methods))))
    refuse_save_pretrained(model)
    note_norms(model, norms)
    forget_compiled_code()
    return new_by_name


def _scopes(plan: FoldPlan) -> dict[str, str]:
    """The scopes of folded norms that a call of another module than their scope may run (see `partial_calls`)."""
    folded_with = {fold.norm: [site.layer for site in fold.sites if not site.after]
                   for fold in plan.folds.values() if not fold.obstacle}
    for change in plan.changes:
        stream = change.stream
        folded_with.setdefault(change.norms[0], []).extend(part.name for part in (*stream.readers, *stream.writers))
    scopes = {}
    for norm, parts in folded_with.items():
        chain = plan.chains.get(norm, ())
        receivers = [plan.receivers[norm]] if parts and norm in plan.receivers else []
        common = commonprefix([chain, *receivers, *(plan.chains.get(part) or _ancestors(part) for part in parts)])
        # `check_scope` knows a call by the name of its function.
        callers = [name for name in common if getattr(getattr(plan.modules.get(name), 'forward', None), '__name__', '')
                   == 'forward']
        if callers and len(common) < len(chain):
            scopes[norm] = callers[-1]
    return scopes


def _ancestors(name: str) -> tuple[str, ...]:
    """The modules that a part of a model is in, and itself, from the outermost."""
    parts = name.split('.')
    return '', *('.'.join(parts[:end]) for end in range(1, len(parts) + 1))
