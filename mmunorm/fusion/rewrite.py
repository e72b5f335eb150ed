"""Part of step 4 of folding: rewrites the layers adjacent to a norm (Algorithm 1), in float64, and removes the norm."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..modules import disable_fast_path
from .affine import has_act
from .joint import join
from .padding import Fill, zero_token
from .reduced import FoldedNorm, FoldedNormAct, TokenScale
from .report import Fold, Site


@torch.no_grad()
def rewrite(model: nn.Module, fold: Fold, scale: Tensor, shift: Tensor, fill: Fill | None = None,
            arguments: dict | None = None) -> None:
    """Folds one norm with this scale and shift, `(C,)` float64: rewrites its layers and their padding, and removes it.

    `fill` is the token to pad with, None for the one that the norm maps to zero. `arguments` are those of the
    :class:`TokenScale` that stays, None if nothing does.
    """
    copied = [name for name in (f'{layer}.weight' for layer in fold.copied) if add_to_state(model, name)]
    if fold.pads and fill is None:
        fill = zero_token(scale, shift)
    fold.beyond_float16 = fill is not None and not fill.fits(torch.float16)
    cancelling = fill if scale.dim() == 1 else None  # a matrix contains the column of the marker
    added = [name for site in fold.sites for name in absorb(model, site, scale, shift, cancelling)]
    for name, pad in fold.pads:
        layer = model.get_submodule(fold.sites[0].layer) if fold.sites else model
        pad(model.get_submodule(name), fill._replace(value=fill.value.to(next(layer.parameters()))))
    if arguments is None:
        replace_by_identity(model, fold.norm, copied + added)
    else:
        reduce_norm(model, fold.norm, arguments, copied + added)


@torch.no_grad()
def reduce_norm(model: nn.Module, name: str, arguments: dict, added: Sequence[str] = (),
                linear: tuple[Tensor, Tensor] | None = None) -> None:
    """Replaces the norm `name` by a :class:`TokenScale`, with weight and bias of a linear layer after it, if any."""
    norm = model.get_submodule(name)
    reduced = TokenScale(**arguments, added=added, like=_like(norm, model))
    if arguments['affine']:
        reduced.scale.copy_(norm.weight)
        if getattr(norm, 'bias', None) is not None:
            reduced.shift.copy_(norm.bias)
    if linear is not None:
        reduced.linear.weight.copy_(linear[0])
        reduced.linear.bias.copy_(linear[1])
    disable_fast_path(model, [name], quiet=True)
    replace_module(model, name, reduced)
    norm.forward = reduced.forward


def _like(norm: nn.Module, model: nn.Module) -> Tensor | None:
    """A tensor of the dtype and device of a norm."""
    tensors = (*norm.parameters(), *norm.buffers(), *model.parameters())
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)


def replace_by_identity(model: nn.Module, name: str, added: Sequence[str]) -> None:
    """Replaces the norm `name` by a :class:`FoldedNorm`."""
    norm = model.get_submodule(name)
    folded = FoldedNormAct(added, norm) if has_act(norm) else FoldedNorm(added, _like(norm, model))
    replace_module(model, name, folded)
    norm.forward = folded.forward  # a plain list, or what torch.compile made of the norm, may still call it


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the submodule `name` by `module`, in eval mode and on its device."""
    old = model.get_submodule(name)
    device = next((tensor.device for tensor in (*old.parameters(), *old.buffers(), *model.parameters())), None)
    owner, _, child = name.rpartition('.')
    setattr(model.get_submodule(owner), child, module.eval().to(device))


@torch.no_grad()
def absorb(model: nn.Module, site: Site, scale: Tensor, shift: Tensor, fill: Fill | None = None) -> list[str]:
    """Folds `scale * x + shift`, `(C,)` float64, into a layer, in index.

    A norm before the layer: `W' = W diag(scale)`, `b' = b + W shift`; with a matrix `W' = W scale`. A norm after it:
    `W' = diag(scale) W`, `b' = scale * b + shift`. With a `fill`, the column of its marker cancels the shifts that
    remain in padded tokens.

    Returns:
        Names of the tensors that an unfolded checkpoint lacks: new biases, and buffers that were not persistent.
    """
    weight = getattr(model.get_submodule(site.layer), site.weight)[site.part]
    scale, shift = scale.to(weight.device), shift.to(weight.device)
    if site.channels is not None and scale.dim() == 1:
        channels = torch.tensor(site.channels, device=weight.device)
        scale, shift = torch.where(channels >= 0, scale[channels], 1.), torch.where(channels >= 0, shift[channels], 0.)
    vectors = _biases(model, site)
    if site.after and not shift.any():  # needs no bias
        vectors = {name: rows for name, rows in vectors.items() if _get(model, name) is not None}
    added = [name for name in vectors if add_to_state(model, name)]
    wide = weight.double()
    trailing = (1, ) * (weight.dim() - 2)
    if site.after:
        weight.copy_(wide * scale.view(-1, 1, *trailing))
        _change_biases(model, vectors, scale, shift)
        return added
    if scale.dim() > 1:  # the layer may read the norm several times, side by side
        times = weight.shape[1] // len(shift)
        scale, shift = torch.kron(torch.eye(times).to(scale), scale), shift.repeat(times)
    groups = len(shift) // weight.shape[1]

    def by_output(values: Tensor) -> Tensor:
        values = values.view(groups, -1).repeat_interleave(len(weight) // groups, 0)
        return values.view(*weight.shape[:2], *trailing)

    shifts = (wide * by_output(shift)).flatten(1).sum(1)
    _change_biases(model, vectors, torch.ones_like(shifts), shifts)
    folded = torch.einsum('oi...,ij->oj...', wide, scale) if scale.dim() > 1 else wide * by_output(scale)
    if fill is not None and fill.marker >= 0:
        cancelled = fill.cancelled.to(weight.device)
        folded[:, fill.marker] = -wide[:, cancelled] @ shift[cancelled]
    weight.copy_(folded)
    return added


def _biases(model: nn.Module, site: Site) -> dict[str, tuple]:
    """The vectors that hold a layer's bias: by full name, the layer's rows and their indices in the vector."""
    if site.bias:
        vectors = {}
        for row, (name, index) in enumerate(site.bias):
            rows, indices = vectors.setdefault(name, ([], []))
            rows.append(row)
            indices.append(index)
        return vectors
    vectors = {join(site.layer, site.weight.replace('weight', 'bias')): (slice(None), site.part)}
    if site.weight == 'in_proj_weight':  # torch's MultiheadAttention needs both of its biases or none
        vectors[join(site.layer, 'out_proj.bias')] = (slice(0, 0), slice(0, 0))
    return vectors


def _change_biases(model: nn.Module, vectors: dict[str, tuple], scale: Tensor, shift: Tensor) -> None:
    """`b' = scale * b + shift`, in each vector that holds parts of b."""
    for name, (rows, indices) in vectors.items():
        vector = _get(model, name)
        vector[indices] = (vector[indices].double() * scale[rows] + shift[rows]).to(vector.dtype)


def _get(model: nn.Module, name: str) -> Tensor | None:
    owner, _, tensor = name.rpartition('.')
    return getattr(model.get_submodule(owner), tensor)


def add_to_state(model: nn.Module, name: str) -> bool:
    """Creates a missing bias, makes a buffer persistent, or copies a shared weight. Returns whether it did."""
    owner, _, tensor = name.rpartition('.')
    module = model.get_submodule(owner)
    if persist(model, name):
        return True
    if tensor == 'weight':  # shared with another layer
        module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=module.weight.requires_grad)
        return True
    if getattr(module, tensor, None) is not None:
        return False
    weight = getattr(module, tensor.replace('bias', 'weight'))
    setattr(module, tensor, nn.Parameter(weight.new_zeros(len(weight)), requires_grad=weight.requires_grad))
    return True


def persist(model: nn.Module, name: str) -> bool:
    """Makes a buffer persistent. Returns whether it was not."""
    owner, _, tensor = name.rpartition('.')
    names = model.get_submodule(owner)._non_persistent_buffers_set
    is_new = tensor in names
    names.discard(tensor)
    return is_new
