"""How each norm is folded, and the basis of rotated residual streams.

Of a LayerNorm, gamma and beta fold into the layers that read it: `W' = W diag(gamma)`, `b' = b + W beta`. If zeros of
padding are among its tokens, `b` stays, and the vector of ones `1` is added to what is left of the norm:
`W' = W (diag(gamma) (I - 11'/C) + beta 1'/C)` then is the same for tokens, and leaves zeros what they are.

A rotated stream computes `x' = Q x` with an orthogonal Q `(C, C)`. If `Q 1 = 1`, a rotation commutes with a LayerNorm
without gamma and beta, also over several tokens side by side: `LN(Q x) = Q LN(x)`. Q is folded into what writes the
stream, `W' = Q W`, and its inverse into what reads it, `W' = W diag(gamma) Q^T`. If only LayerNorms of single tokens
read the stream, its writers also subtract the mean, which no such norm sees.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..norms.layers import is_channels_first
from .check import reads_whole_tokens
from .folds import Fold, Reader, Stream, StreamBasis
from .norms import Affine, statistic_of
from .obstacles import Obstacle
from .padding import Fill, zero_token
from .plan import FoldPlan

# A norm that writes a rotated stream is followed by a linear layer. That pays if several norms can be rotated for it.
_NORMS_PER_LINEAR = 3


def rotation(width: int, seed: int) -> Tensor:
    """An orthogonal matrix Q `(C, C)` with `Q 1 = 1`, which spreads each channel over all.

    `Q = F^T D P F` with a Hadamard matrix F whose first row is constant, and in its other rows random signs D and a
    random permutation P.
    """
    hadamard, generator = _hadamard(width), torch.Generator().manual_seed(seed)
    signs = torch.where(torch.rand(width - 1, generator=generator) < 0.5, -1., 1.).double()
    rows = hadamard[1:][torch.randperm(width - 1, generator=generator)]
    return hadamard.mT @ torch.cat((hadamard[:1], signs[:, None] * rows))


def head_rotation(width: int, seed: int) -> Tensor:
    """An orthogonal matrix `(d, d)`: Hadamard with random signs."""
    generator = torch.Generator().manual_seed(seed)
    return _hadamard(width) * torch.where(torch.rand(width, generator=generator) < 0.5, -1., 1.).double()


def _hadamard(width: int) -> Tensor:
    """Hadamard for the power of 2 in `width`, times a cosine transform for the rest; the first row is constant."""
    matrix, rest = torch.ones(1, 1, dtype=torch.float64), width
    while rest % 2 == 0:
        matrix, rest = torch.kron(torch.tensor([[1., 1.], [1., -1.]], dtype=torch.float64), matrix), rest // 2
    rows = torch.arange(rest, dtype=torch.float64)
    cosines = torch.cos(math.pi / rest * torch.outer(rows, rows + 0.5)) * (2 / rest)**0.5
    cosines[0] = rest**-0.5
    return torch.kron(cosines, matrix) * (width / rest)**-0.5


@dataclass(frozen=True, eq=False)
class Rotation:
    """A residual stream and its new basis."""
    stream: Stream
    new: StreamBasis

    @property
    def writing(self) -> Tensor:
        """The matrix for what writes the stream, `(C, C)`."""
        return self.new.basis - self.new.is_centered / self.stream.width  # Q (I - 11'/C), as Q 1 = 1

    def reading(self, reader: Reader) -> Tensor:
        """The matrix for a reader's input, `(k C, k C)` of k tokens side by side."""
        if reader.channels == tuple(range(self.stream.width)):
            return self.new.basis.mT
        channels = torch.tensor(reader.channels)
        token = (channels[:, None] == channels).tril(-1).sum(1)  # which of the k tokens each channel is of
        return torch.where(token[:, None] == token, self.new.basis[channels][:, channels].mT, 0.)


def rotation_of(plan: FoldPlan, stream: Stream, seed: int) -> Rotation | Obstacle:
    """How a stream is rotated, or why it cannot be."""
    if stream.obstacle:
        return stream.obstacle
    for reader in stream.readers:
        if obstacle := _reader_obstacle(plan, stream, reader):
            return obstacle
    scales = [writer.scale for writer in stream.writers if writer.scale]
    if len(scales) > len(set(scales)):
        return Obstacle('layer scales', scales[0])
    # These need a linear layer: norms that write the stream, and those that keep gamma.
    mapped = list(dict.fromkeys([*(writer.name for writer in stream.writers if writer.kind == 'norm'),
                                 *(name for name in stream.norms if plan.folds[name].obstacle)]))
    if len(mapped) * _NORMS_PER_LINEAR > len(stream.norms):
        return Obstacle('own layer', mapped[0])
    if maps := [norm for norm in mapped if is_channels_first(plan.norms[norm])]:
        return Obstacle('maps', maps[0])
    is_centered = all(reader.is_norm and statistic_of(plan.norms[reader.name]) == 'variance'
                      and len(reader.channels) == stream.width for reader in stream.readers)
    return Rotation(stream, StreamBasis(stream.norms, rotation(stream.width, seed), is_centered))


def _reader_obstacle(plan: FoldPlan, stream: Stream, reader: Reader) -> Obstacle | None:
    if not reader.is_norm:
        return None
    name, norm, fold = reader.name, plan.norms[reader.name], plan.folds[reader.name]
    if plan.obstacles[name]:
        return Obstacle('reader', name, cause=plan.obstacles[name])
    is_online = bool(statistic_of(norm))
    if fold.obstacle and (not is_online or len(reader.channels) > stream.width):
        return Obstacle('reader', name, cause=fold.obstacle)
    if any(site.after for site in fold.sites) or fold.joint is not None:
        return Obstacle('parts', name)
    for site in fold.sites if not fold.obstacle else ():
        if not reads_whole_tokens(site, len(reader.channels), plan.modules[site.layer]):
            return Obstacle('parts', site.layer)
    if fold.pads and zero_token(*plan.affines[name]).marker >= 0:
        return Obstacle('marker', name)
    return None


@dataclass
class NewNorm:
    """How a norm is folded: its affine map, its padding, and what is left of it."""
    affine: Affine
    fill: Fill | None = None
    left: dict | None = None  # the note of what is left of it; None if nothing is
    linear: Affine | None = None  # weight and bias of the linear layer that follows


def new_norms(plan: FoldPlan) -> dict[str, NewNorm]:
    """By name, how each norm of the plan is folded."""
    affines, new_by_name = dict(plan.affines), {}
    for joint in plan.joints:
        if not joint.obstacle:
            affines.update(joint.affines(plan))
    readings = {reader.name: (rotation, rotation.reading(reader)) for rotation in plan.rotations
                for reader in rotation.stream.readers if reader.is_norm}
    for fold in plan.folds.values():
        if fold.norm not in affines:
            continue
        scale, shift = (value.cpu() for value in affines[fold.norm])  # as the bases
        statistic, (rotated, reading) = statistic_of(plan.norms[fold.norm]), readings.get(fold.norm, (None, None))
        new = new_by_name[fold.norm] = NewNorm((scale, shift))
        if statistic and (not fold.obstacle or rotated):
            new.left = _left(plan, fold, statistic, rotated is not None and rotated.new.is_centered)
        if reading is not None:
            if fold.pads:
                new.fill = zero_token(scale, shift)
                new.fill = new.fill._replace(value=reading.mT @ new.fill.value)
            new.affine = (scale[:, None] * reading if scale.dim() == 1 else scale @ reading), shift
        if fold.obstacle:
            if rotated:
                new.linear = new.affine
        elif statistic == 'variance' and fold.is_padded:
            scale, shift = new.affine
            matrix = torch.diag(scale) if scale.dim() == 1 else scale
            new.affine = matrix - matrix.mean(1, keepdim=True) + shift[:, None] / len(shift), torch.zeros_like(shift)
    for rotation in plan.rotations:
        for writer in rotation.stream.writers:
            if writer.kind == 'norm':
                new, fold = new_by_name[writer.name], plan.folds[writer.name]
                scale, shift = new.linear or new.affine
                scale = torch.diag(scale) if scale.dim() == 1 else scale
                new.linear = rotation.writing @ scale, rotation.writing @ shift
                new.left = new.left or _left(plan, fold, statistic_of(plan.norms[writer.name]), False)
    return new_by_name


def _left(plan: FoldPlan, fold: Fold, statistic: str, is_centered: bool) -> dict:
    norm = plan.norms[fold.norm]
    note = dict(width=len(plan.affines[fold.norm][1]), eps=norm.eps, channels_first=is_channels_first(norm))
    if statistic == 'mean_square':
        return dict(note, kind='rms_norm')
    return dict(note, kind='layer_norm', is_centered=is_centered, is_padded=fold.is_padded and not fold.obstacle)
