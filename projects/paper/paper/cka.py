"""Linear CKA between the layers of two models (Fig. 6), without the bias of small batches.

Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019, with the minibatch
estimate of Nguyen et al., ICLR 2021, of the unbiased HSIC of Song et al., JMLR 2012 (Eq. 5).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from mmunorm.norms.layers import norm_layers

# The number of features per example that are in float64 at a time.
_CHUNK = 2**16
_BRANCHES = ('attn', 'ffn', 'mlp')


def gram(features: Tensor) -> Tensor:
    """Inner products between the examples of a batch `(n, ...)`, as `(n, n)` float64.

    Each feature's mean over the batch is subtracted. This does not change CKA, but improves precision.
    """
    features = features.flatten(1)
    total = torch.zeros(len(features), len(features), dtype=torch.float64, device=features.device)
    for chunk in features.split(_CHUNK, dim=1):
        chunk = chunk.double()
        chunk = chunk - chunk.mean(dim=0)
        total += chunk @ chunk.T
    return total


def centre(grams: Tensor) -> Tensor:
    """U-centres symmetric Gram matrices `(layers, n, n)`: zeros on the diagonals, and rows that sum to zero.

    The inner product of two, divided by n (n - 3), is their unbiased HSIC.

    Raises:
        ValueError: n is less than 4, for which there is no unbiased estimate.
    """
    n = grams.shape[-1]
    if n < 4:
        raise ValueError(f'grams: the unbiased HSIC needs batches of at least 4 examples, got {n}')
    off_diagonal = 1 - torch.eye(n, dtype=grams.dtype, device=grams.device)
    grams = grams * off_diagonal
    rows = grams.sum(dim=-1, keepdim=True) / (n - 2)
    total = grams.sum(dim=(-2, -1), keepdim=True) / ((n - 1) * (n - 2))
    return (grams - rows - rows.transpose(-2, -1) + total) * off_diagonal


def hsic(grams_a: Tensor, grams_b: Tensor) -> np.ndarray:
    """The unbiased HSIC `(layers_a, layers_b)` from the Gram matrices `(layers, n, n)` of the same n examples."""
    n = grams_a.shape[-1]
    a, b = centre(grams_a).flatten(1), centre(grams_b).flatten(1)
    return (a @ b.T / (n * (n - 3))).cpu().numpy()


def branch_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Norms, attentions and feed-forward networks by name, in the order of the model (Fig. 6).

    The latter two are the modules called `attn`, `ffn` or `mlp`, as OpenMMLab and timm name them.
    """
    norms = dict(norm_layers(model))

    def is_branch(name: str) -> bool:
        *outer, last = name.split('.')
        return last in _BRANCHES and not any(part in _BRANCHES for part in outer)

    return {name: module for name, module in model.named_modules() if name in norms or is_branch(name)}


def output_grams(layers: dict[str, nn.Module], forward: Callable[[], object], examples: int) -> dict[str, Tensor]:
    """Gram matrices `(n, n)` of the outputs of a model's layers, in the order in which they run in `forward`.

    Activations are reduced immediately and not kept. If a layer runs several times, all of its outputs are features.
    Outputs that are not tensors of n examples `(n, ...)` are ignored.
    """
    grams: dict[str, Tensor] = {}

    def add(name: str, module: nn.Module, args: tuple, output) -> None:
        if isinstance(output, (tuple, list)) and output:
            output = output[0]
        if isinstance(output, Tensor) and output.dim() > 1 and len(output) == examples:
            grams[name] = grams.get(name, 0) + gram(output.detach())

    handles = [module.register_forward_hook(partial(add, name)) for name, module in layers.items()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return grams


def compare_models(batches: Iterable[tuple[object, int]], run_a: Callable, run_b: Callable,
                   layers_a: dict[str, nn.Module],
                   layers_b: dict[str, nn.Module]) -> tuple[np.ndarray, list[str], list[str]]:
    """Linear CKA between the layers of two models on the same images, summed over batches.

    Args:
        batches: pairs of a batch and its number of examples; batches of fewer than 4 are ignored.
        run_a, run_b: functions that run the models on a batch.
        layers_a, layers_b: the layers to compare, by name.

    Returns:
        CKA `(layers_a, layers_b)`, at most 1, and about 0 (or slightly below) for unrelated layers; and the names of
        the layers, in the order in which they run.

    Raises:
        ValueError: no batch has 4 examples, or a model has no layer with an output for each example.
    """
    names, cross, self_a, self_b = None, 0., 0., 0.
    for batch, examples in batches:
        if examples < 4:
            continue
        found = [output_grams(layers, partial(run, batch), examples)
                 for layers, run in ((layers_a, run_a), (layers_b, run_b))]
        names = names or [list(grams) for grams in found]
        if not all(names):
            raise ValueError('a model has no norm, attention or feed-forward layer with an output for each image')
        a, b = (torch.stack([grams[name] for name in order]) for grams, order in zip(found, names, strict=True))
        cross, self_a, self_b = cross + hsic(a, b), self_a + hsic(a, a).diagonal(), self_b + hsic(b, b).diagonal()
    if names is None:
        raise ValueError('the unbiased estimate needs batches of at least 4 images')
    with np.errstate(invalid='ignore', divide='ignore'):
        return cross / np.sqrt(np.outer(self_a, self_b)), *names
