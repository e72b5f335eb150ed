"""Step 2 of folding: checks why a norm cannot fold. Each reason is half a sentence; '' means that there is none."""
from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

from ..registry import is_missing
from .affine import Affine, statistic_of
from .examples import is_removable
from .joint import JointFold
from .padding import zero_token
from .plan import FoldPlan, call_obstacle
from .report import Fold

_LAYERS = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
if not is_missing('mmengine', 'mmcv'):
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


def _obstacle(fold: Fold, plan: FoldPlan) -> str:
    scale, shift = plan.affines[fold.norm]
    for site in fold.sites:
        layer = plan.modules[site.layer]
        weight = getattr(layer, site.weight)
        if isinstance(weight, nn.Parameter) and type(weight) is not nn.Parameter:
            return f'its neighbour {site.layer} has a weight of type {type(weight).__name__}, not a plain tensor'
        if scale.dim() > 1 and (site.after or site.channels != tuple(range(len(shift)))
                                or weight.shape[1] != len(shift)):
            return f'it mixes channels, which cannot be folded into its neighbour {site.layer}'
        if site.layer not in fold.copied and (why := _held_elsewhere(site.layer, plan)):
            return f'its neighbour {site.layer} {why}'
    if scale.dim() > 1 and (fold.pads or fold.joint is not None):
        return 'it mixes channels, and its output is padded with zeros or it folds with other norms'
    return '' if fold.joint is not None else _fill_obstacle(fold, plan, (scale, shift))


def _fill_obstacle(fold: Fold, plan: FoldPlan, affine: Affine) -> str:
    """Why the padding after a norm that is folded with this scale and shift cannot be filled, or ''."""
    if not fold.pads or not fold.sites:
        return ''
    dtype = plan.modules[fold.sites[0].layer].weight.dtype
    if zero_token(*affine).fits(dtype):
        return ''
    return f'{str(dtype).removeprefix("torch.")} cannot represent the padding token that replaces zeros'


def _joint_obstacle(plan: FoldPlan, joint: JointFold) -> str:
    """Why all norms of a joint fold must be kept, or '': one of them must be, or the rest cannot be changed."""
    norms = (*joint.norms, *joint.requires)
    if not plan.folds.keys() >= set(norms):
        return 'norms that fold with it are folded already'
    for norm in norms:
        if plan.folds[norm].obstacle:
            return f'it cannot be folded past {norm}: {plan.folds[norm].obstacle}'
        if statistic_of(plan.norms[norm]):
            return f'it cannot be folded past {norm}, which computes its statistics at inference'
    if obstacle := joint.check(plan):
        return obstacle
    affines = joint.affines(plan)
    obstacles = (_fill_obstacle(plan.folds[norm], plan, affines.get(norm, plan.affines[norm])) for norm in norms)
    return next(filter(None, obstacles), '')


def layer_obstacle(name: str, plan: FoldPlan) -> str:
    """Why another output cannot be folded into the layer `name`, with its name, or ''."""
    layer = plan.modules[name]
    if not is_layer(layer):
        why = f'is a {type(layer).__name__}, not a linear layer or convolution'
    elif parametrize.is_parametrized(layer) and not is_removable(layer):
        why = 'has a parametrized weight'
    else:
        why = call_obstacle(layer) or _held_elsewhere(name, plan)
    return f'{name} {why}' if why else ''


def _held_elsewhere(name: str, plan: FoldPlan) -> str:
    """What else holds the weights of the layer `name`, or ''."""
    if shared := plan.owners.others(name, plan.modules[name]):
        return f'is shared with {shared}'
    parts = name.split('.')
    for kind in (type(plan.modules['.'.join(parts[:i])]) for i in range(len(parts))):
        if callable(getattr(kind, 'merge', None)) and callable(getattr(kind, 'unmerge', None)):  # such as peft's LoRA
            return (f'is part of {kind.__name__}, whose merge() would undo the fold; '
                    'merge it first (peft: merge_and_unload())')
    return ''


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer or convolution."""
    return type(module).forward in _LAYERS
