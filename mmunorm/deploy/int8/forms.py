"""The two forms of a norm in an INT8 model: folded, or kept as one multiply and one add in front of the quantizer.

A folded norm's linear layer reads the raw residual stream, whose channels may differ much; one step size for all of
them then loses the small ones. A kept norm makes them alike first, and runtimes compute it in the kernel that writes
the stream. Which is better is measured, at the layers that read the norm.
"""
from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...fusion import FusionReport, fuse_norms
from ...fusion.algebra import affine_of, is_conv
from ...fusion.fuse import plan
from ...norms.layers import is_channels_first
from ..graphs import graph_of
from .noise import signal_to_noise

NUM_TOKENS = 2048  # of each layer's input


class ScaleShift(nn.Module):
    """A norm with fixed statistics, as `scale * x + shift`.

    Args:
        scale, shift (Tensor): `(C, )` floating point.
    """

    def __init__(self, scale: Tensor, shift: Tensor):
        super().__init__()
        self.register_buffer('scale', scale)
        self.register_buffer('shift', shift)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is `(..., C)`."""
        return self.scale * x + self.shift


@dataclass(frozen=True)
class NormForm:
    """One norm that could be folded, and how well 8 bits serve either form.

    Attributes:
        norm: full name of the layer.
        readers: names of the layers that read it.
        folded: signal to noise in dB at the output of the reader that is worst, if the norm is folded.
        kept: the same, if it stays as one multiply and one add.
        spread: largest over smallest root mean square of the channels of the norm's input; a channel that is
            always 0 is left out.
    """
    norm: str
    readers: tuple[str, ...]
    folded: float
    kept: float
    spread: float

    @property
    def is_kept(self) -> bool:
        """Whether the norm stays."""
        return self.kept > self.folded


@torch.no_grad()
def choose_forms(model: nn.Module, inputs: Iterable[tuple[Tensor, ...]], bits: int = 8) -> list[NormForm]:
    """Measures both forms of each norm that can be folded into the layers behind it.

    Args:
        model (nn.Module): with its norms, in eval mode; unchanged.
        inputs: batches of :func:`mmunorm.deploy.graphs.graph_of`'s inputs.
        bits (int): of activations and weights. Defaults to 8.

    Returns:
        list[NormForm]: in the order of the model. Norms that go into the layer in front of them are not in it.
    """
    folds = [fold for fold in plan(model) if not fold.obstacle and fold.readers
             and not is_channels_first(model.get_submodule(fold.norm))]
    inputs = list(inputs)
    folded = copy.deepcopy(model)
    fuse_norms(folded)
    readers = [reader for fold in folds for reader in fold.readers]
    tokens = {name: _tokens_of(each, readers, inputs) for name, each in (('kept', model), ('folded', folded))}
    forms = []
    for fold in folds:
        worst = {}
        for name, each in (('kept', model), ('folded', folded)):
            worst[name] = min(signal_to_noise(tokens[name][reader], each.get_submodule(reader).weight.flatten(1), bits)
                              for reader in fold.readers if reader in tokens[name])
        raw = tokens['folded'][fold.readers[0]].square().mean(0).sqrt()
        raw = raw[raw > 0]
        forms.append(NormForm(fold.norm, tuple(fold.readers), **worst, spread=(raw.max() / raw.min()).item()))
    return forms


def apply_forms(model: nn.Module, forms: Sequence[NormForm]) -> FusionReport:
    """Makes the kept norms one multiply and one add, and folds all others, in place.

    Args:
        model (nn.Module): with its norms, in eval mode.
        forms (Sequence[NormForm]): what :func:`choose_forms` gives.

    Returns:
        FusionReport: of the others.
    """
    for form in forms:
        if form.is_kept:
            norm = model.get_submodule(form.norm)
            scale, shift = (value.to(norm.weight.dtype) for value in affine_of(norm))
            model.set_submodule(form.norm, ScaleShift(scale, shift).eval())
    return fuse_norms(model)


def _tokens_of(model: nn.Module, names: Sequence[str], inputs: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Some of the tokens that layers read, `(tokens, C)` each; the same ones for the same inputs."""
    generator = torch.Generator().manual_seed(0)
    share = -(-NUM_TOKENS // len(inputs))
    found = defaultdict(list)

    def keep(name, layer):
        def hook(module, args):
            x = args[0].movedim(1, -1) if is_conv(layer) else args[0]
            x = x.flatten(0, -2)
            found[name].append(x[torch.randint(len(x), (share, ), generator=generator)])
        return hook

    graph = graph_of(model)
    with ExitStack() as stack:
        for name in names:
            layer = model.get_submodule(name)
            stack.callback(layer.register_forward_pre_hook(keep(name, layer)).remove)
        for batch in inputs:
            graph(*batch)
    return {name: torch.cat(parts) for name, parts in found.items()}
