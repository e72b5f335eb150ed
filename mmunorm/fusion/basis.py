"""Changes the basis of a residual stream, so that all that is linear in the LayerNorms that read it folds.

With an orthogonal matrix Q `(C, C)`, whose first row is `1 / sqrt(C)`, the folded model computes `x' = Q x`. Channel 0
of x' is sqrt(C) times the mean of x, so the variance of x is `v = sum over c >= 1 of x'_c^2 / C`, and with
`P = diag(0, 1, ..., 1)`

    LN(x) = diag(gamma) Q^T P x' / sqrt(v + eps) + beta.

Q is folded into what writes the stream, `W' = Q W`, and `diag(gamma) Q^T P` and beta into what reads the norm. If only
norms of single tokens read the stream, its writers also subtract the mean. Then v is the mean square of a token, and
the channels can stay as they are: `Q = 1`. A norm over k tokens side by side has one mean over all of them.
"""
from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..norms.layers import is_channels_first
from .affine import Affine, statistic_of
from .check import is_layer, layer_obstacle
from .padding import Fill, zero_token
from .plan import FoldPlan
from .reduced import StreamBasis
from .report import Fold
from .residual import Reader, ResidualStream, Writer
from .rewrite import persist, replace_by_identity

ROTATIONS = ('hadamard', 'random')
# A norm that writes the stream becomes a norm and a linear layer. That pays if several norms of the stream get cheaper.
_NORMS_PER_LINEAR = 3


@dataclass(frozen=True)
class BasisChange(StreamBasis):
    """The change of a stream to a new basis."""
    stream: ResidualStream

    @property
    def writing(self) -> Tensor:
        """The matrix for what writes the stream, `(C, C)`."""
        centering = torch.eye(self.stream.width, dtype=torch.float64) - self.is_centered / self.stream.width
        return centering if self.basis is None else self.basis @ centering

    def reading(self, reader: Reader) -> Tensor:
        """The matrix for what reads tokens of the stream, side by side or with alternating channels."""
        basis = torch.eye(self.stream.width, dtype=torch.float64) if self.basis is None else self.basis
        many = torch.eye(reader.parts, dtype=torch.float64)
        return (torch.kron(basis, many) if reader.interleaved else torch.kron(many, basis)).mT.contiguous()


def change_of(plan: FoldPlan, stream: ResidualStream, rotate: str | None, seed: int) -> BasisChange | None:
    """The change of basis of a stream that its norms need, or that `rotate` asks for; None for none."""
    statistics = [statistic_of(plan.norms[name]) for name in stream.norms]
    if len(stream.writers) < 2 or not (stream.norms or _covered(plan, stream)):
        rotate = None  # not a residual stream
    is_centered = 'variance' in statistics and set(statistics) == {'variance'} and all(
        reader.is_norm and reader.parts == 1 for reader in stream.readers)
    needs_mean = 'variance' in statistics and not is_centered
    is_padded = any(plan.folds[norm].pads for norm in stream.norms)
    if rotate is None and not is_centered and not needs_mean:
        return None
    basis, keeps_mean = None, needs_mean or is_padded and 'variance' in statistics
    if rotate is not None or needs_mean:
        basis = mean_basis(stream.width, rotate, seed) if keeps_mean else rotation(stream.width, rotate, seed)
    norms = [*stream.norms, *(fold.norm for fold in _covered(plan, stream).values())]
    order = {name: number for number, name in enumerate(plan.chains)}
    norms = sorted(set(norms), key=lambda name: order.get(name, len(order)))
    return BasisChange(norms, basis, is_centered, basis is not None and keeps_mean, stream)


def rotation(width: int, kind: str, seed: int) -> Tensor:
    """An orthogonal matrix `(C, C)`: 'random', or 'hadamard' with random signs."""
    generator = torch.Generator().manual_seed(seed)
    if kind == 'random':
        return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
    return _hadamard(width) * torch.where(torch.rand(width, generator=generator) < 0.5, -1., 1.).double()


def mean_basis(width: int, kind: str | None, seed: int) -> Tensor:
    """An orthogonal matrix `(C, C)` whose first row is `1 / sqrt(C)`; None for the nearest to the identity."""
    mean = torch.full((width, ), width**-0.5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    if kind == 'hadamard':
        return _hadamard(width)[:, torch.randperm(width, generator=generator)]
    if kind == 'random':
        columns = torch.randn(width, width, generator=generator, dtype=torch.float64)
        columns[:, 0] = mean
        basis = torch.linalg.qr(columns)[0].mT
        return basis * basis[0, 0].sign()
    normal = mean.clone()
    normal[0] -= 1
    square = normal @ normal
    return torch.eye(width, dtype=torch.float64) - (2 / square * torch.outer(normal, normal) if square else 0)


def _hadamard(width: int) -> Tensor:
    """Hadamard for the power of 2 in `width`, times a cosine transform for the rest; the first row is constant."""
    matrix, rest = torch.ones(1, 1, dtype=torch.float64), width
    while rest % 2 == 0:
        matrix, rest = torch.kron(torch.tensor([[1., 1.], [1., -1.]], dtype=torch.float64), matrix), rest // 2
    rows = torch.arange(rest, dtype=torch.float64)
    cosines = torch.cos(math.pi / rest * torch.outer(rows, rows + 0.5)) * (2 / rest)**0.5
    cosines[0] = rest**-0.5
    return torch.kron(cosines, matrix) * (width / rest)**-0.5


def obstacle_of(plan: FoldPlan, change: BasisChange) -> str:
    """Why the basis of a stream cannot change, as half a sentence, or ''."""
    stream = change.stream
    covered = _covered(plan, stream)
    for reader in stream.readers:
        if why := _reader_obstacle(plan, change, reader, covered):
            return why
    scales = [writer.scale for writer in stream.writers if writer.scale]
    if len(scales) > len(set(scales)):
        return f'several layers are multiplied by one of {", ".join(sorted(set(scales)))}'
    for writer in stream.writers:
        if why := _writer_obstacle(plan, writer):
            return why
    mapped = _mapped(plan, change)
    if len(mapped) * _NORMS_PER_LINEAR > len(covered) + len(stream.norms):
        return f'{mapped[0]} would need a linear layer of its own'
    return ''


def _covered(plan: FoldPlan, stream: ResidualStream) -> dict[str, Fold]:
    """The folds of offline norms whose layers read the stream, by layer."""
    layers = {reader.name for reader in stream.readers if not reader.is_norm}
    folds = [fold for fold in plan.folds.values() if not fold.obstacle and not statistic_of(plan.norms[fold.norm])]
    return {site.layer: fold for fold in folds for site in fold.sites if not site.after and site.layer in layers}


def _reader_obstacle(plan: FoldPlan, change: BasisChange, reader: Reader, covered: dict[str, Fold]) -> str:
    name, width = reader.name, reader.parts * change.stream.width
    fold = plan.folds[name] if reader.is_norm else covered.get(name)
    if reader.is_norm:
        norm = plan.norms[name]
        if not statistic_of(norm):
            return f'it is read by {name} ({type(norm).__name__})'
        if change.basis is not None and plan.obstacles[name]:
            return f'it is read by {name}, which {plan.obstacles[name]}'
        if fold.obstacle and reader.parts > 1:
            return f'it is read by {name}: {fold.obstacle}'
    if change.basis is None:
        return ''
    if fold is not None and not fold.obstacle:
        for site in fold.sites:
            layer = plan.modules[site.layer]
            times = 1 if fold.pads or site.channels is None else len(site.channels) // width  # side by side
            if getattr(layer, 'groups', 1) > 1 or site.channels not in (None, times * tuple(range(width))):
                return f'{site.layer} reads parts of {fold.norm}'
            if not reader.is_norm and site.layer not in {other.name for other in change.stream.readers}:
                return f'{fold.norm} is read by {site.layer}, too'
        is_filled = change.has_mean_channel and reader.is_norm
        if fold.pads and not is_filled and (reader.parts > 1 or zero_token(*plan.affines[fold.norm]).marker >= 0):
            return f'{fold.norm} is padded, and has channels of scale 0'
        return ''
    if reader.is_norm:
        return ''
    layer = plan.modules.get(name) if name else None
    if layer is None or not is_layer(layer):
        return f'it is read by {name or "a layer with a computed weight"} without a norm'
    if getattr(layer, 'groups', 1) > 1:
        return f'it is read by {name}, a convolution with groups'
    return layer_obstacle(name, plan)


def _writer_obstacle(plan: FoldPlan, writer: Writer) -> str:
    if writer.kind == 'token':
        return ''
    if writer.kind == 'norm':
        why = plan.obstacles[writer.name] or not statistic_of(plan.norms[writer.name]) and 'is no LayerNorm' or (
            not plan.folds[writer.name].obstacle and 'is folded')
        return f'it is written by {writer.name}, which {why}' if why else ''
    module = plan.modules[writer.name]
    if writer.kind == 'embedding':
        if type(module) is not nn.Embedding or module.max_norm is not None or parametrize.is_parametrized(module):
            return f'it is written by {writer.name} ({type(module).__name__})'
        shared = plan.owners.others(writer.name, module)
        return f'it is written by {writer.name}, which is shared with {shared}' if shared else ''
    if getattr(module, 'groups', 1) > 1:
        return f'it is written by {writer.name}, a convolution with groups'
    return layer_obstacle(writer.name, plan)


def _mapped(plan: FoldPlan, change: BasisChange) -> list[str]:
    """The norms that need a linear layer: those that write the stream, and in a new basis those that keep gamma."""
    writers = [writer.name for writer in change.stream.writers if writer.kind == 'norm']
    if change.basis is None:
        return writers
    kept = {fold.norm for fold in plan.folds.values() if fold.obstacle}
    return list(dict.fromkeys([*writers, *(name for name in change.norms if name in kept)]))


@dataclass
class NewNorm:
    """How a norm is folded in the new bases: its affine map, its padding, and what is left of it."""
    affine: Affine
    fill: Fill | None = None
    arguments: dict | None = None  # of its TokenScale; None if nothing is left
    linear: Affine | None = None  # weight and bias of the linear layer that follows


def new_norms(plan: FoldPlan) -> dict[str, NewNorm]:
    """By name, how each norm of the plan is folded."""
    changes, affines, new_by_name = plan.changes, dict(plan.affines), {}
    for joint in plan.joints:
        if not joint.obstacle:
            affines.update(joint.affines(plan))
    for fold in plan.folds.values():
        if fold.norm in affines:
            scale, shift = affines[fold.norm]
            new_by_name[fold.norm] = NewNorm((scale.cpu(), shift.cpu()))  # as the bases
            if statistic_of(plan.norms[fold.norm]) and not fold.obstacle:
                new_by_name[fold.norm].arguments = _arguments(plan, fold)
    for change in changes:
        covered = {fold.norm: fold for fold in _covered(plan, change.stream).values()}
        for reader in change.stream.readers:
            if reader.is_norm and reader.name in new_by_name:
                _read(plan, change, reader, new_by_name[reader.name])
        for name, fold in covered.items() if change.basis is not None else ():
            reader = next(reader for reader in change.stream.readers if reader.name == fold.sites[0].layer)
            scale, shift = new_by_name[name].affine
            new_by_name[name].affine = scale[:, None] * change.reading(reader), shift
            if fold.pads:
                new_by_name[name].fill = _rotated_fill(change, scale, shift)
    for change in changes:
        for writer in change.stream.writers:
            if writer.kind == 'norm':
                new = new_by_name[writer.name]
                (scale, shift), t = new.affine, change.writing
                scale = torch.diag(scale) if scale.dim() == 1 else scale
                new.linear = t @ scale, t @ shift
                new.arguments = {**(new.arguments or _arguments(plan, plan.folds[writer.name])), 'linear': True,
                                 'affine': False}
    return new_by_name


def _rotated_fill(change: BasisChange, scale: Tensor, shift: Tensor) -> Fill:
    """The token that the norm maps to zero, in the new basis."""
    fill = zero_token(scale, shift)
    return fill._replace(value=change.basis @ fill.value)


def _arguments(plan: FoldPlan, fold: Fold) -> dict:
    norm = plan.norms[fold.norm]
    return dict(width=len(plan.affines[fold.norm][1]), eps=norm.eps, statistic=statistic_of(norm),
                channels_first=is_channels_first(norm), affine=bool(fold.obstacle))


def _read(plan: FoldPlan, change: BasisChange, reader: Reader, new: NewNorm) -> None:
    """Sets how an online norm that reads a stream is folded in its new basis."""
    fold, (scale, shift) = plan.folds[reader.name], new.affine
    is_variance, width = statistic_of(plan.norms[reader.name]) == 'variance', len(shift)
    new.arguments = {**_arguments(plan, fold), 'statistic': 'mean_square'}
    if is_variance and not change.is_centered:
        step = 1 if reader.interleaved else change.stream.width
        new.arguments['mean_channels'] = list(range(0, width, step))[:reader.parts]
    if change.basis is None:
        return
    matrix = change.reading(reader)
    if is_variance and reader.parts > 1:
        matrix = matrix - matrix.mean(0)
    elif is_variance and change.has_mean_channel:
        matrix[:, 0] = 0
    matrix = scale[:, None] * matrix
    if fold.obstacle:
        new.linear = matrix, shift
        new.arguments.update(linear=True, affine=False)
    elif fold.pads:
        if change.has_mean_channel:  # it is 0 in all other tokens, or made 0
            matrix[:, 0] = -shift
            value = torch.zeros_like(shift)
            value[0] = 1
            new.fill = Fill(value, -1 if change.is_centered else 0)
        else:
            new.fill = _rotated_fill(change, scale, shift)
    new.affine = matrix, shift


@torch.no_grad()
def apply_change(model: nn.Module, change: BasisChange, covered: Collection[str]) -> list[str]:
    """Folds a change of basis into what writes the stream, and into the layers that read it without a norm, in place.

    `covered` are the layers whose norms are folded with the new basis already. Returns the names of buffers that were
    not persistent.
    """
    matrix = change.writing
    tensors = [writer.name for writer in change.stream.writers if writer.kind == 'token']
    added = [name for name in tensors if persist(model, name)]
    for writer in change.stream.writers:
        if writer.kind != 'norm':
            _write(model, writer, matrix)
    for reader in change.stream.readers:
        if not reader.is_norm and reader.name not in covered and change.basis is not None:
            weight = model.get_submodule(reader.name).weight
            weight.copy_(torch.einsum('oi...,ij->oj...', weight.double(), change.reading(reader).to(weight.device)))
    return added


def _write(model: nn.Module, writer: Writer, matrix: Tensor) -> None:
    if writer.kind == 'token':
        owner, _, name = writer.name.rpartition('.')
        token = getattr(model.get_submodule(owner), name)
        wide = token.double().movedim(writer.axis, -1) @ matrix.mT.to(token.device)
        token.copy_(wide.movedim(-1, writer.axis))
        return
    layer = model.get_submodule(writer.name)
    matrix = matrix.to(layer.weight.device)
    if writer.kind == 'embedding':
        layer.weight.copy_(layer.weight.double() @ matrix.mT)
        return
    if writer.scale:
        matrix = matrix * _take_scale(model, writer.scale)
    layer.weight.copy_(torch.einsum('ij,jk...->ik...', matrix, layer.weight.double()))
    if layer.bias is not None:
        layer.bias.copy_(matrix @ layer.bias.double())


def _take_scale(model: nn.Module, name: str) -> Tensor:
    """Returns the values of a LayerScale, which becomes 1; its module is removed if it does nothing else."""
    owner, _, parameter = name.rpartition('.')
    module = model.get_submodule(owner)
    scale = getattr(module, parameter)
    values = scale.detach().double().flatten().clone()
    scale.fill_(1)
    if owner and is_layer_scale(module):
        replace_by_identity(model, owner, ())
    return values


def is_layer_scale(module: nn.Module | None) -> bool:
    """Whether a module does nothing but multiply the channels of a token by its only parameter."""
    if module is None or list(module.children()) or list(module.buffers()):
        return False
    scales = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    if len(scales) != 1 or len(list(module.parameters())) > 1:
        return False
    scale = scales[0].detach()
    x = torch.randn(2, len(scale), dtype=scale.dtype, device=scale.device)
    try:
        return torch.equal(module(x.clone()), x * scale)
    except Exception:
        return False
