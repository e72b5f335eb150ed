"""Step 4 of folding: the only module that writes to a model. Layers get new tensors, computed in float64."""
from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from os.path import commonprefix

import torch
from torch import Tensor, nn

from ..compat import forget_compiled_code
from ..modules import disable_fast_path, refuse_save_pretrained
from .basis import NewNorm, Rotation, new_norms
from .folds import Fold, Site, StreamBasis, Writer, ancestors, join
from .layers import NOT_SAVED, Folded, FoldedNorm, built
from .padding import zero_token
from .plan import FoldPlan
from .scopes import hold, refuse_hidden_states, set_scopes


@torch.no_grad()
def apply(plan: FoldPlan, model: nn.Module) -> dict[str, NewNorm]:
    """Applies a plan in place to its model, or to a copy of it. Returns how each norm is folded, by name."""
    added: list[str] = []
    new_by_name = new_norms(plan)
    for name, new in new_by_name.items():
        fold = plan.folds[name]
        if not fold.obstacle:
            rewrite(model, fold, new)
        elif new.left is not None:
            _replace_norm(model, fold.norm, new, ())
    for joint in plan.joints:
        if not joint.obstacle:
            joint.apply(model, plan)
    for rotation in plan.rotations:
        added += _rotate(model, rotation)
    for attention in plan.attentions:
        for site, matrix, shift in attention.changes:
            added += absorb(model, site, matrix, shift)
    if added:
        next(module for module in model.modules() if isinstance(module, Folded)).added += tuple(dict.fromkeys(added))
    set_streams(model, [rotation.new for rotation in plan.rotations])
    set_scopes(model, _scopes(plan))
    refuse_save_pretrained(model, lambda part: isinstance(part, Folded), NOT_SAVED)
    forget_compiled_code()
    return new_by_name


def set_streams(model: nn.Module, streams: Sequence[StreamBasis]) -> None:
    """Stores the rotated residual streams of a model in their first norms, and refuses `output_hidden_states`."""
    for stream in streams:
        model.get_submodule(stream.norms[0]).stream = stream
        refuse_hidden_states(model)


def streams_of(model: nn.Module) -> tuple[StreamBasis, ...]:
    """The residual streams that are rotated in a folded model, as in the report of its folding."""
    streams = (vars(module).get('stream') for module in model.modules())
    return tuple(stream for stream in streams if isinstance(stream, StreamBasis))


def rewrite(model: nn.Module, fold: Fold, new: NewNorm) -> None:
    """Folds one norm: rewrites its layers and their padding, and replaces it by what is left of it."""
    scale, shift = new.affine
    fill = (new.fill or zero_token(scale, shift)) if fold.pads else None
    fold.beyond_float16 = fill is not None and not fill.fits(torch.float16)
    added = [f'{layer}.weight' for layer in fold.copied]  # which a new one is no longer shared with
    for site in fold.sites:
        added += absorb(model, site, scale, shift, fill)
        hold(model, {site.layer: [fold.norm]})
    for name, pad in fold.pads:
        layer = model.get_submodule(fold.sites[0].layer) if fold.sites else model
        token = fill._replace(value=fill.value.to(next(layer.parameters())))
        replace_module(model, name, pad(model.get_submodule(name), token))
    _replace_norm(model, fold.norm, new, added)


def _replace_norm(model: nn.Module, name: str, new: NewNorm, added: Sequence[str]) -> None:
    norm = model.get_submodule(name)
    tensors = (*norm.parameters(), *norm.buffers(), *model.parameters())
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    if new.left is None:
        replacement = FoldedNorm(added, like)
    else:
        replacement = built(**new.left, linear=new.linear is not None, added=added, like=like)
        disable_fast_path(model, [name])
        if new.linear is not None:
            replacement.linear.weight.copy_(new.linear[0])
            replacement.linear.bias.copy_(new.linear[1])
    replace_module(model, name, replacement)
    norm.forward = replacement.forward  # a plain list, or what torch.compile made of the norm, may still call it


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the submodule `name` by `module`, in eval mode and on its device."""
    old = model.get_submodule(name)
    device = next((tensor.device for tensor in (*old.parameters(), *old.buffers(), *model.parameters())), None)
    owner, _, child = name.rpartition('.')
    setattr(model.get_submodule(owner), child, module.eval().to(device))


@torch.no_grad()
def absorb(model: nn.Module, site: Site, scale: Tensor, shift: Tensor, fill=None) -> list[str]:
    """Folds `scale * x + shift`, `(C,)` or `(C, C)` float64, into a layer.

    A norm before the layer: `W' = W diag(scale)`, `b' = b + W shift`; with a matrix `W' = W scale`. A norm after it:
    `W' = diag(scale) W`, `b' = scale * b + shift`; with a matrix `W' = scale W`. A smaller matrix is for each of
    several heads or tokens that are side by side. With a `fill`, the column of its marker cancels the shifts that
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
    if (site.after or scale.dim() > 1) and not shift.any():  # needs no bias
        vectors = {name: rows for name, rows in vectors.items() if attrgetter(name)(model) is not None}
    added = [name for name in vectors if add_to_state(model, name)]
    name, wide = join(site.layer, site.weight), weight.double()
    if site.after:
        _set_rows(model, name, site.part, _times(scale, wide, 0))
        _change_biases(model, vectors, scale, shift)
        return added
    if scale.dim() > 1:  # the layer may read the norm several times
        shift = shift.repeat(weight.shape[1] // len(shift))
    groups = len(shift) // weight.shape[1]

    def times(values: Tensor) -> Tensor:
        """The weight times a value for each of its inputs."""
        trailing = (1, ) * (weight.dim() - 2)
        return (wide.unflatten(0, (groups, -1)) * values.view(groups, 1, -1, *trailing)).flatten(0, 1)

    _change_biases(model, vectors, torch.tensor(1.), times(shift).flatten(1).sum(1))
    folded = _times(scale.mT, wide, 1) if scale.dim() > 1 else times(scale)
    if fill is not None and fill.marker >= 0:
        cancelled = fill.cancelled.to(weight.device)
        folded[:, fill.marker] = -wide[:, cancelled] @ shift[cancelled]
    _set_rows(model, name, site.part, folded)
    return added


def _times(scale: Tensor, values: Tensor, axis: int) -> Tensor:
    """A scale times the vector along a dimension, or a square matrix times each of those that are side by side."""
    parts = values.movedim(axis, -1)
    parts = parts * scale if scale.dim() < 2 else (parts.unflatten(-1, (-1, len(scale))) @ scale.mT).flatten(-2)
    return parts.movedim(-1, axis)


def _set_rows(model: nn.Module, name: str, part: slice | list[int], rows: Tensor) -> None:
    """Changes a part of a parameter or buffer."""
    value = attrgetter(name)(model).detach().clone()
    value[part] = rows.to(value.dtype)
    set_tensor(model, name, value)


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
    """`b' = scale b + shift`, in the vectors that hold parts of b."""
    bias = torch.zeros_like(shift)
    for name, (rows, indices) in vectors.items():
        bias[rows] = attrgetter(name)(model)[indices].double()
    bias = _times(scale, bias, 0) + shift
    for name, (rows, indices) in vectors.items():
        _set_rows(model, name, indices, bias[rows])


def set_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Gives a module a new parameter or buffer: others may hold the old one."""
    owner, _, tensor = name.rpartition('.')
    old = attrgetter(name)(model)
    value = value.to(old)
    setattr(model.get_submodule(owner), tensor,
            nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value)


def add_to_state(model: nn.Module, name: str) -> bool:
    """Creates a missing bias, or makes a buffer persistent. Returns whether it did."""
    owner, _, tensor = name.rpartition('.')
    module = model.get_submodule(owner)
    if tensor in module._non_persistent_buffers_set:
        module._non_persistent_buffers_set.remove(tensor)
        return True
    if getattr(module, tensor, None) is not None:
        return False
    weight = getattr(module, tensor.replace('bias', 'weight'))
    setattr(module, tensor, nn.Parameter(weight.new_zeros(len(weight)), requires_grad=weight.requires_grad))
    return True


# Residual streams.

def _rotate(model: nn.Module, rotation: Rotation) -> list[str]:
    """Folds a rotation into what writes the stream, and into the layers that read it without a norm; returns as
    `absorb`."""
    added = []
    zero = torch.zeros(rotation.stream.width, dtype=torch.float64)
    for writer in rotation.stream.writers:
        if writer.kind == 'token':
            added += [writer.name] * add_to_state(model, writer.name)
            token = attrgetter(writer.name)(model)
            wide = token.double().movedim(writer.axis, -1) @ rotation.writing.mT.to(token.device)
            set_tensor(model, writer.name, wide.movedim(-1, writer.axis).contiguous())
        elif writer.kind == 'layer':
            matrix = rotation.writing
            if writer.scale:
                matrix = matrix * _take_scale(model, writer).to(matrix)
            added += absorb(model, writer.site, matrix, zero)
    for reader in rotation.stream.readers:
        if not reader.is_norm:
            added += absorb(model, reader.site, rotation.reading(reader), zero.new_zeros(len(reader.channels)))
    return added


def _take_scale(model: nn.Module, writer: Writer) -> Tensor:
    """Returns the values of a LayerScale, which becomes 1; its module is removed if it does nothing else."""
    owner, _, _ = writer.scale.rpartition('.')
    scale = attrgetter(writer.scale)(model)
    values = scale.detach().double().flatten().cpu()
    set_tensor(model, writer.scale, torch.ones_like(scale))
    if owner and is_layer_scale(model.get_submodule(owner)):
        replace_module(model, owner, FoldedNorm((), scale))
    return values


def is_layer_scale(module: nn.Module | None) -> bool:
    """Whether a module does nothing but multiply the channels of a token by its only parameter."""
    parameters = [] if module is None else list(module.parameters())
    if len(parameters) != 1 or parameters[0].dim() != 1 or list(module.children()) or list(module.buffers()):
        return False
    scale = parameters[0].detach()
    x = torch.randn(2, len(scale), dtype=scale.dtype, device=scale.device)
    try:
        return torch.equal(module(x.clone()), x * scale)
    except Exception:
        return False


# Scopes.

def _scopes(plan: FoldPlan) -> dict[str, str]:
    """The scopes of folded norms that a call of another module than their scope may run (see `scopes`)."""
    scopes = {}
    for fold in plan.folds.values():
        layers = [site.layer for site in fold.sites if not site.after]
        if not fold.obstacle and layers:
            scopes[fold.norm] = _scope(plan, fold.norm, layers, [('norm', fold.norm)])
    for rotation in plan.rotations:
        stream = rotation.stream
        layers = [part.name for part in (*stream.readers, *stream.writers)]
        sources = [(writer.kind.replace('norm', 'written norm'), join(writer.name, writer.site and writer.site.weight))
                   for writer in stream.writers]
        sources += [('scaled', writer.scale) for writer in stream.writers]
        for norm in stream.norms:
            scopes[norm] = _scope(plan, norm, layers, sources)
    return {norm: name for norm, name in scopes.items() if name is not None}


def _scope(plan: FoldPlan, norm: str, parts: Sequence[str], sources: Sequence[tuple[str, str]]) -> str | None:
    """The innermost module that runs a norm and these parts in all its calls, and gets all channels of these sources;
    None if it need not be checked."""
    chain = plan.chains.get(norm, ())
    common = commonprefix([chain, *(plan.receivers[source] for source in sources if source in plan.receivers),
                           *(plan.chains.get(part) or (*ancestors(part), part) for part in parts)])
    # A module may have methods that run parts of it; of those in a model, blocks have none.
    return common[-1] if common and (len(common) < len(chain) or len(common) == 1) else None
