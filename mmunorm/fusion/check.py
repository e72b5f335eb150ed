"""Step 2 of folding: checks why a norm cannot fold."""
from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.nn.utils import parametrize

from ..registry import MISSING
from .folds import Fold, JointFold, Site
from .norms import Affine, statistic_of
from .obstacles import Obstacle
from .padding import zero_token
from .plan import FoldPlan, call_obstacle

# Those of plain linear layers and convolutions.
_LAYERS = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
if not {'mmengine', 'mmcv'} & MISSING.keys():
    from mmcv.cnn.bricks import wrappers
    _LAYERS += (wrappers.Linear.forward, wrappers.Conv2d.forward, wrappers.Conv3d.forward)


def check(plan: FoldPlan) -> None:
    """Sets the obstacle of each fold whose norm must be kept, unless it is already set."""
    for fold in plan.folds.values():
        fold.obstacle = fold.obstacle or _obstacle(fold, plan)
    for joint in plan.joints:
        joint.obstacle = _joint_obstacle(plan, joint)
        for fold in plan.folds_of(joint):
            fold.obstacle = fold.obstacle or joint.obstacle


def _obstacle(fold: Fold, plan: FoldPlan) -> Obstacle | None:
    scale, shift = plan.affines[fold.norm]
    for site in fold.sites:
        layer = plan.modules[site.layer]
        weight = getattr(layer, site.weight)
        if isinstance(weight, nn.Parameter) and type(weight) is not nn.Parameter:
            return Obstacle('weight type', site.layer, type(weight).__name__)
        # A matrix, or a LayerNorm whose layer marks padded tokens, takes all channels.
        if (scale.dim() > 1 or fold.is_padded) and not reads_whole_tokens(site, len(shift), layer):
            return Obstacle('mixes channels' if scale.dim() > 1 else 'parts of a padded norm', site.layer)
        if site.layer not in fold.copied and (held := plan.held_elsewhere(site.layer)):
            return Obstacle('neighbor held', site.layer, cause=held)
    if scale.dim() > 1 and (fold.pads or fold.joint is not None):
        return Obstacle('mixes and pads')
    return None if fold.joint is not None else _fill_obstacle(fold, plan, (scale, shift))


def reads_whole_tokens(site: Site, width: int, layer: nn.Module) -> bool:
    """Whether a layer reads all channels of a norm, once or several times side by side."""
    times = getattr(layer, site.weight).shape[1] // width
    return not site.after and getattr(layer, 'groups', 1) == 1 and site.channels == times * tuple(range(width))


def _fill_obstacle(fold: Fold, plan: FoldPlan, affine: Affine) -> Obstacle | None:
    """Why the padding after a norm that is folded with this scale and shift cannot be filled, or None."""
    if not fold.pads or not fold.sites:
        return None
    dtype = plan.modules[fold.sites[0].layer].weight.dtype
    return None if zero_token(*affine).fits(dtype) else Obstacle(
        'padding token', detail=str(dtype).removeprefix('torch.'))


def _joint_obstacle(plan: FoldPlan, joint: JointFold) -> Obstacle | None:
    """Why all norms of a joint fold must be kept, or None: one of them must be, or the rest cannot be changed."""
    norms = (*joint.norms, *joint.requires)
    if not plan.folds.keys() >= set(norms):
        return Obstacle('folded already')
    for norm in norms:
        if plan.folds[norm].obstacle:
            return Obstacle('joint', norm, cause=plan.folds[norm].obstacle)
        if statistic_of(plan.norms[norm]):
            return Obstacle('joint', norm, cause=Obstacle('online', type(plan.norms[norm]).__name__))
    if obstacle := joint.check(plan):
        return obstacle
    affines = joint.affines(plan)
    obstacles = (_fill_obstacle(plan.folds[norm], plan, affines.get(norm, plan.affines[norm])) for norm in norms)
    return next(filter(None, obstacles), None)


def layer_obstacle(name: str, plan: FoldPlan) -> Obstacle | None:
    """Why another output cannot be folded into the layer `name`, or None."""
    layer = plan.modules[name]
    if type(layer).forward not in _LAYERS:
        return Obstacle('no layer', type(layer).__name__, owner=name)
    if parametrize.is_parametrized(layer):
        return Obstacle('parametrized', owner=name)
    obstacle = call_obstacle(layer) or plan.held_elsewhere(name)
    return obstacle and replace(obstacle, owner=name)
