"""The two forms of a norm in an INT8 model: folded, or kept as one multiply and one add in front of the quantizer.

A folded norm's linear layer reads the raw residual stream, whose channels may differ much; one step size for all of
them then loses the small ones. A kept norm makes them alike first, and runtimes compute it in the kernel that writes
the stream. Which is better is measured, at the layers that read the norm.
"""
from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ...fusion import FusionReport, fuse_norms
from ...fusion.algebra import affine_of, is_conv, num_channels
from ...fusion.fuse import plan
from ...norms.layers import is_channels_first
from ..graphs import graph_of
from .noise import signal_to_noise

BITS = 8  # of activations and weights
NUM_TOKENS = 2048  # of each layer's input


class ScaleShift(nn.Module):
    """A norm with fixed statistics, as `scale * x + shift`; `fuse_norms` would fold a `NoNorm(affine=True)`.

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
    def form(self) -> str:
        """'folded' or 'kept', whichever loses less."""
        return 'kept' if self.kept > self.folded else 'folded'


@torch.no_grad()
def choose_forms(model: nn.Module, samples: Sequence[tuple[np.ndarray, ...]],
                 progress: bool = False) -> list[NormForm]:
    """Measures both forms of each norm that can be folded into the layers behind it, with 8 bits.

    Args:
        model (nn.Module): with its norms, in eval mode; unchanged.
        samples (Sequence[tuple[np.ndarray, ...]]): batches of the inputs of :func:`mmunorm.deploy.graphs.graph_of`.
        progress (bool): show a progress bar. Defaults to False.

    Returns:
        list[NormForm]: in the order of the model. Norms that go into the layer in front of them, or that
        stand in the residual stream, are not in it.
    """
    folds = plan(model)
    # Norms in the residual stream itself fold together, or not at all.
    carried = {name for fold in folds if fold.stream for name in (fold.norm, *fold.stream.ends)}
    folds = [fold for fold in folds if not fold.obstacle and fold.readers and fold.norm not in carried
             and not is_channels_first(model.get_submodule(fold.norm))
             and all(reads_single_tokens(model.get_submodule(reader)) for reader in fold.readers)]
    folded = copy.deepcopy(model)
    fuse_norms(folded)
    forms = dict(folded=folded, kept=model)
    readers = [reader for fold in folds for reader in fold.readers]
    tokens = {name: tokens_of(each, readers, samples, f'{name} norms' if progress else None)
              for name, each in forms.items()}

    def worst_of(name: str, readers: Sequence[str]) -> float:
        return min(signal_to_noise(tokens[name][reader], forms[name].get_submodule(reader).weight.flatten(1), BITS)
                   for reader in readers)

    return [NormForm(fold.norm, tuple(fold.readers), worst_of('folded', fold.readers), worst_of('kept', fold.readers),
                     _spread(tokens['folded'][fold.readers[0]])) for fold in folds]


def reads_single_tokens(layer: nn.Module) -> bool:
    """Whether a linear layer or convolution computes each output from one token."""
    return layer.weight[0].numel() == num_channels(layer)


def _spread(tokens: Tensor) -> float:
    sizes = tokens.square().mean(0).sqrt()
    sizes = sizes[sizes > 0]
    return (sizes.max() / sizes.min()).item() if len(sizes) else 1.


def apply_forms(model: nn.Module, forms: Sequence[NormForm]) -> FusionReport:
    """Makes the kept norms one multiply and one add, and folds all others, in place.

    Args:
        model (nn.Module): with its norms, in eval mode.
        forms (Sequence[NormForm]): what :func:`choose_forms` gives.

    Returns:
        FusionReport: of the others.
    """
    for form in forms:
        if form.form == 'kept':
            norm = model.get_submodule(form.norm)
            scale, shift = (value.to(norm.weight.dtype) for value in affine_of(norm))
            model.set_submodule(form.norm, ScaleShift(scale, shift).eval())
    return fuse_norms(model)


def forms_table(forms: Sequence[NormForm]) -> str:
    """What was measured and chosen, as a table in Markdown."""
    lines = ['| norm | spread | folded, dB | kept, dB | form |', '|---|---:|---:|---:|---|']
    lines += [f'| `{form.norm}` | {form.spread:.1f} | {form.folded:.1f} | {form.kept:.1f} | {form.form} |'
              for form in forms]
    return '\n'.join(lines)


@torch.no_grad()
def tokens_of(model: nn.Module, names: Sequence[str], samples: Sequence[tuple[np.ndarray, ...]],
              title: str | None = None) -> dict[str, Tensor]:
    """Some of the tokens that layers read, `(tokens, C)` each; the same ones for the same samples.

    Args:
        model (nn.Module): in eval mode.
        names (Sequence[str]): full names of linear layers and convolutions.
        samples (Sequence[tuple[np.ndarray, ...]]): batches of the inputs of :func:`mmunorm.deploy.graphs.graph_of`.
        title (str, optional): of a progress bar. Defaults to None, for no bar.
    """
    share = -(-NUM_TOKENS // len(samples))
    found = defaultdict(list)

    def hook_of(name: str, layer: nn.Module, batch: int) -> Callable:
        def hook(module, args):
            x = (args[0].movedim(1, -1) if is_conv(layer) else args[0]).flatten(0, -2)
            generator = torch.Generator().manual_seed(batch)
            found[name].append(x[torch.randint(len(x), (share, ), generator=generator)])
        return hook

    graph = graph_of(model)
    for batch, arrays in enumerate(tqdm(samples, desc=title, unit='batch', disable=title is None)):
        with ExitStack() as stack:
            for name in names:
                layer = model.get_submodule(name)
                stack.callback(layer.register_forward_pre_hook(hook_of(name, layer, batch)).remove)
            graph(*map(torch.from_numpy, arrays))
    return {name: torch.cat(parts) for name, parts in found.items()}
