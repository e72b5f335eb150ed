"""Part of step 4 of folding: rewrites the layers adjacent to a norm (Algorithm 1), in float64, and removes the norm."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..norms import Norm
from ..norms.replace import put
from .affine import has_act
from .padding import Fill, zero_token
from .report import Fold, Site
from .rules import join


class FoldedNorm(nn.Identity):
    """Replaces a norm that has been folded.

    Its buffer `folded` marks folded checkpoints, so that loading one into an unfolded model, or the reverse, is an
    error. Its `weight` and `bias` are empty; models read the dtype and device of a norm from them.

    Args:
        made: names of the tensors that folding the norm added to the model's state_dict. Defaults to none.
        like: a tensor of the norm's dtype and device. Defaults to None, for torch's defaults.
    """

    def __init__(self, made: Sequence[str] = (), like: Tensor | None = None):
        super().__init__()
        self.made = tuple(made)
        self.register_buffer('folded', torch.tensor(True))
        self.register_buffer('weight', torch.empty(0) if like is None else like.new_empty(0), persistent=False)

    @property
    def bias(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor, pad_mask: Tensor | None = None, data_format: str | None = None) -> Tensor:
        """Returns `x`; accepts the other arguments of norms."""
        return x

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if prefix + 'weight' in state_dict:
            raise RuntimeError(
                f'{prefix}weight: the model is folded, but this checkpoint is not. Load it into the '
                'unfolded model of its config, then call mmunorm.fuse_norms(model).')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


Norm.refused_state['folded'] = (
    'this checkpoint is of a folded model, but this model has norms. First call '
    "mmunorm.fuse_norms(model.eval()), or build the model with mmunorm.load_folded.")


class FoldedNormAct(FoldedNorm):
    """Replaces a folded norm of timm that includes an activation, which is kept."""

    def __init__(self, made: Sequence[str], norm: nn.Module):
        super().__init__(made, norm.running_var)
        self.drop, self.act = norm.drop, norm.act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(x))


@torch.no_grad()
def rewrite(model: nn.Module, fold: Fold, scale: Tensor, shift: Tensor) -> None:
    """Folds one norm with this scale and shift, `(C,)` float64: rewrites its layers and their padding, removes it."""
    untied = [name for name in (f'{layer}.weight' for layer in fold.untied) if add_to_state(model, name)]
    fill = zero_token(scale, shift) if fold.pads else None
    fold.beyond_float16 = fill is not None and not fill.fits(torch.float16)
    made = [name for site in fold.sites for name in absorb(model, site, scale, shift, fill)]
    for name, pad in fold.pads:
        layer = model.get_submodule(fold.sites[0].layer) if fold.sites else model
        pad(model.get_submodule(name), fill._replace(value=fill.value.to(next(layer.parameters()))))
    leave(model, fold.norm, untied + made)


def leave(model: nn.Module, name: str, made: Sequence[str]) -> None:
    """Replaces the norm `name` by a :class:`FoldedNorm`."""
    norm = model.get_submodule(name)
    like = next((tensor for tensor in (*norm.parameters(), *norm.buffers()) if tensor.is_floating_point()), None)
    folded = FoldedNormAct(made, norm) if has_act(norm) else FoldedNorm(made, like)
    exchange(model, name, folded)
    norm.forward = folded.forward  # a plain list, or what torch.compile made of the norm, may still call it


def exchange(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the submodule `name` by `module`, in eval mode and on its device."""
    old = model.get_submodule(name)
    device = next((tensor.device for tensor in (*old.parameters(), *old.buffers(), *model.parameters())), None)
    put(model, {name: module.eval().to(device)})


@torch.no_grad()
def absorb(model: nn.Module, site: Site, scale: Tensor, shift: Tensor, fill: Fill | None = None) -> list[str]:
    """Folds `scale * x + shift`, `(C,)` float64, into a layer, in place.

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
    made = [name for name in vectors if add_to_state(model, name)]
    wide = weight.double()
    trailing = (1, ) * (weight.dim() - 2)
    if site.after:
        weight.copy_(wide * scale.view(-1, 1, *trailing))
        _change_biases(model, vectors, scale, shift)
        return made
    groups = len(shift) // weight.shape[1]

    def by_output(values: Tensor) -> Tensor:
        values = values.view(groups, -1).repeat_interleave(len(weight) // groups, 0)
        return values.view(*weight.shape[:2], *trailing)

    shifts = (wide * by_output(shift)).flatten(1).sum(1)
    _change_biases(model, vectors, torch.ones_like(shifts), shifts)
    folded = torch.einsum('oi...,ij->oj...', wide, scale) if scale.dim() > 1 else wide * by_output(scale)
    if fill is not None and fill.marker >= 0:
        undone = fill.undone.to(weight.device)
        folded[:, fill.marker] = -wide[:, undone] @ shift[undone]
    weight.copy_(folded)
    return made


def _biases(model: nn.Module, site: Site) -> dict[str, tuple]:
    """The vectors that hold a layer's bias: by full name, the layer's rows and their indices in the vector."""
    if site.bias:
        vectors = {}
        for row, (name, place) in enumerate(site.bias):
            rows, places = vectors.setdefault(name, ([], []))
            rows.append(row)
            places.append(place)
        return vectors
    vectors = {join(site.layer, site.weight.replace('weight', 'bias')): (slice(None), site.part)}
    if site.weight == 'in_proj_weight':  # torch's MultiheadAttention needs both of its biases or none
        vectors[join(site.layer, 'out_proj.bias')] = (slice(0, 0), slice(0, 0))
    return vectors


def _change_biases(model: nn.Module, vectors: dict[str, tuple], scale: Tensor, shift: Tensor) -> None:
    """`b' = scale * b + shift`, in each vector that holds parts of b."""
    for name, (rows, places) in vectors.items():
        vector = _get(model, name)
        vector[places] = (vector[places].double() * scale[rows] + shift[rows]).to(vector.dtype)


def _get(model: nn.Module, name: str) -> Tensor | None:
    owner, _, tensor = name.rpartition('.')
    return getattr(model.get_submodule(owner), tensor)


def add_to_state(model: nn.Module, name: str) -> bool:
    """Creates a missing bias, makes a buffer persistent, or copies a shared weight. Returns whether it did."""
    owner, _, tensor = name.rpartition('.')
    module = model.get_submodule(owner)
    if tensor in module._non_persistent_buffers_set:
        module._non_persistent_buffers_set.discard(tensor)
        return True
    if tensor == 'weight':  # shared with another layer
        module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=module.weight.requires_grad)
        return True
    if getattr(module, tensor, None) is not None:
        return False
    weight = getattr(module, tensor.replace('bias', 'weight'))
    setattr(module, tensor, nn.Parameter(weight.new_zeros(len(weight)), requires_grad=weight.requires_grad))
    return True
