"""Folding of residual schemes: post-norm streams, whose norms are after the sums, and factors of branches.

The output of a post-norm layer is consumed by a sum, so its norm cannot be folded into a linear layer alone. The
stream is therefore written as `x = P u + c`, with a diagonal P and a vector c that are carried along it; the folded
model computes u. A sublayer `x' = D (a x + b F(x)) + beta` with a norm of scale D and shift beta becomes

    u' = u + (b / a) P^-1 F(P u + c),    P' = a D P,    c' = a D c + beta:

P and c are folded into the first linear layer of F, `(b / a) P^-1` into its last, and the final P and c into the
consumers of the stream. P shrinks geometrically with depth, so all of this is computed in float64.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmunorm.fusion import JointFold, Obstacle, Use
from mmunorm.fusion.check import layer_obstacle
from mmunorm.fusion.folds import Site, join
from mmunorm.fusion.norms import Affine
from mmunorm.fusion.padding import largest_value
from mmunorm.fusion.plan import FoldPlan, call_obstacle
from mmunorm.fusion.rewrite import absorb, replace_module

from .connect import ResidualLayer
from .sublayer import describe


class PostNormSublayer(NamedTuple):
    """A sublayer F of a post-norm stream, `x' = norm(a x + b F(x))`, by the names of its submodules.

    `residual` is the connection that adds, and `last` the last linear layer of F.
    """
    residual: str
    last: str
    norm: str

    def within(self, prefix: str) -> PostNormSublayer:
        """The same with full names, for a module with the name `prefix`."""
        return PostNormSublayer(*(join(prefix, name) for name in self))


class PostNormStream(JointFold):
    """The residual stream of post-norm layers.

    `sublayers` are in order. `ends` are norms that consume the end of the stream, over its channels or over several
    consecutive copies of each.
    """

    def __init__(self, sublayers: Sequence[PostNormSublayer], ends: Sequence[str] = ()):
        super().__init__(norms=tuple(sublayer.norm for sublayer in sublayers), requires=tuple(ends),
                         changed=tuple(sublayer.last for sublayer in sublayers))
        self.sublayers = tuple(sublayers)
        self._next = dict(zip(self.norms, (*self.sublayers[1:], None), strict=True))

    def within(self, prefix: str) -> PostNormStream:
        return PostNormStream([sublayer.within(prefix) for sublayer in self.sublayers],
                              [join(prefix, end) for end in self.requires])

    def allows(self, norm: str, use: Use) -> bool:
        """The next sum, or at the end a norm, before which the tokens may be unfolded."""
        following = self._next[norm]
        if following is not None:
            return use.inside == following.residual
        return bool(self.requires) and (use.norm in self.requires or (use.code, use.part) == ('function', 'unfold'))

    def check(self, plan: FoldPlan) -> Obstacle | None:
        for sublayer in self.sublayers:
            if obstacle := layer_obstacle(sublayer.last, plan) or _residual_obstacle(plan, sublayer.residual):
                return obstacle
        return self._range_obstacle(plan)

    def affines(self, plan: FoldPlan) -> dict[str, Affine]:
        carried = self._carry(plan)
        affines = dict(zip(self.norms, carried[1:], strict=True))
        p, c = carried[-1]
        for end in self.requires:  # which may repeat each channel of the stream several times in a row
            scale, shift = plan.affines[end]
            copies = scale.numel() // p.numel()
            affines[end] = scale * p.repeat_interleave(copies), scale * c.repeat_interleave(copies) + shift
        return affines

    def apply(self, model: nn.Module, plan: FoldPlan) -> None:
        for sublayer, (p, _) in zip(self.sublayers, self._carry(plan)[:-1], strict=True):
            a, b = plan.modules[sublayer.residual].scales()
            scale = _factor(b, p) / (_factor(a, p) * p)
            absorb(model, Site(sublayer.last, after=True), scale, torch.zeros_like(p))
            _remove_factors(model, sublayer.residual)

    def _carry(self, plan: FoldPlan) -> list[Affine]:
        """P and c before the first sublayer and after each, `(C,)` float64."""
        affines: list[Affine] = []
        for sublayer in self.sublayers:
            scale, shift = plan.affines[sublayer.norm]
            p, c = affines[-1] if affines else (torch.ones_like(scale), torch.zeros_like(shift))
            affines = affines or [(p, c)]
            scale = scale * _factor(plan.modules[sublayer.residual].scales()[0], scale)
            affines.append((scale * p, scale * c + shift))
        return affines

    def _range_obstacle(self, plan: FoldPlan) -> Obstacle | None:
        """Why P and c cannot be carried in the dtype of the weights, or None."""
        for sublayer, (p, c) in zip(self.sublayers, self._carry(plan)[1:], strict=True):
            if (plan.affines[sublayer.norm][0] == 0).any():
                return Obstacle('other', detail=(
                    f'the scale of {sublayer.norm} is 0 in some channel, so its input cannot be recovered'))
            dtype = plan.modules[sublayer.last].weight.dtype
            limit, size = largest_value(dtype), p.abs()
            least, greatest, offset = size.min().item(), size.max().item(), (c.abs() / size).max().item()
            if not (1 / limit < least and max(greatest, offset) < limit):
                return Obstacle('other', detail=(
                    f'after {sublayer.norm} the stream has scales of {least:.1e} to {greatest:.1e} and shifts up to '
                    f'{offset:.1e} times them, which exceeds the range of {str(dtype).removeprefix("torch.")}'))
        return None


class BranchFactor(JointFold):
    """Connection `residual` multiplies the output of layer `last` by b, which can fold into it.

    This holds if the modules `between` the two are identities, for example folded norms. If a norm between the layer
    and the sum was kept, b is kept too.
    """

    def __init__(self, residual: str, last: str, between: Sequence[str] = ()):
        super().__init__(changed=(last, *between))
        self.residual, self.last, self.between = residual, last, tuple(between)

    def within(self, prefix: str) -> BranchFactor:
        return BranchFactor(*(join(prefix, name) for name in (self.residual, self.last)),
                            [join(prefix, name) for name in self.between])

    def check(self, plan: FoldPlan) -> Obstacle | None:
        return layer_obstacle(self.last, plan) or _residual_obstacle(plan, self.residual)

    def apply(self, model: nn.Module, plan: FoldPlan) -> None:
        if not all(isinstance(model.get_submodule(name), nn.Identity) for name in self.between):
            return
        layer, b = model.get_submodule(self.last), plan.modules[self.residual].scales()[1]
        like = torch.ones(layer.out_features, dtype=torch.float64, device=layer.weight.device)
        absorb(model, Site(self.last, after=True), _factor(b, like), torch.zeros_like(like))
        _remove_factors(model, self.residual)


def _remove_factors(model: nn.Module, name: str) -> None:
    """Replaces the connection `name` by one whose factors are folded."""
    replace_module(model, name, model.get_submodule(name).without_factors())


def _residual_obstacle(plan: FoldPlan, name: str) -> Obstacle | None:
    obstacle = call_obstacle(plan.modules[name])
    return obstacle and replace(obstacle, owner=name)


def _factor(scale: float | Tensor | None, like: Tensor) -> Tensor:
    """a or b of a scheme as a tensor like `like`."""
    if scale is None:
        return torch.ones_like(like)
    scale = torch.as_tensor(scale, dtype=like.dtype, device=like.device)  # a float at its full precision
    return scale.detach().expand_as(like)


def branch_factors(layer: ResidualLayer) -> Iterator[BranchFactor]:
    """The fold rule of a layer with residual schemes."""
    for name, part, norm in layer.sublayers():
        residual, sublayer = getattr(layer, name), describe(getattr(layer, part))
        if residual.norm_at != 'post' and sublayer.is_plain_after_last and residual.scales()[1] is not None:
            inner = f'{name}.norm'
            between = (norm, inner) if residual.norm_at == 'mid' else (inner, )
            yield BranchFactor(name, _path(layer, sublayer.last), between)


def post_norm_streams(layers: Sequence[ResidualLayer], name: str, ends: Sequence[str] = ()) -> list[PostNormStream]:
    """The stream of layers `name.0`, `name.1`, ...; none if their norms are not in the stream."""
    sublayers = []
    for i, layer in enumerate(layers):
        for residual, part, norm in layer.sublayers():
            sublayer = describe(getattr(layer, part))
            if getattr(layer, residual).norm_at != 'post' or not sublayer.is_plain_after_last:
                return []
            sublayers.append(PostNormSublayer(residual, _path(layer, sublayer.last), norm).within(f'{name}.{i}'))
    return [PostNormStream(sublayers, ends)] if sublayers else []


def _path(layer: nn.Module, part: nn.Module) -> str:
    """The name of a part within a layer."""
    return next(name for name, module in layer.named_modules() if module is part)
